// The transport's connections: who is let in, who is dropped, who is dialled. See transport.h.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "transport.h"

namespace ftar {

namespace {
constexpr size_t kMaxStrangers = 256;
}  // namespace

void Transport::accept_all(int rail) {
  RailPort& port = ports_[static_cast<size_t>(rail)];
  for (int i = 0; i < 64; ++i) {
    const int fd = ::accept4(port.sockets.listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if ((errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) && !drop_oldest_stranger()) {
        for (size_t r = 0; r < ports_.size(); ++r) watch(ports_[r].sockets.listener, kListenerId + r, 0, false);
        listen_again_ms_ = now_ms() + 100;
      }
      return;
    }
    size_t strangers = 0;
    for (const auto& [id, conn] : conns_) strangers += conn->stage() == Conn::Stage::hello ? 1 : 0;
    if (strangers >= kMaxStrangers) drop_oldest_stranger();
    tune(fd, options_.congestion);
    const uint64_t id = next_id_++;
    try {
      auto conn = std::make_unique<Conn>(*this, fd, rail, id);
      if (conn->stage() == Conn::Stage::closed) continue;
      conns_[id] = std::move(conn);
    } catch (const std::exception&) {  // no memory, no room in epoll: this one is dropped, the rest lives
      ::close(fd);
      continue;
    }
    next_expire_ms_ = std::min(next_expire_ms_, now_ms() + kExpireEveryMs);
  }
}

bool Transport::drop_oldest_stranger() {
  Conn* oldest = nullptr;
  for (const auto& [id, conn] : conns_) {
    if (conn->stage() == Conn::Stage::hello && (oldest == nullptr || conn->since_ms() < oldest->since_ms())) {
      oldest = conn.get();
    }
  }
  if (oldest != nullptr) oldest->fail("too many strangers", ConnEnd::here);
  return oldest != nullptr;
}

void Transport::expire(double now) {
  next_expire_ms_ = now + kExpireEveryMs;
  if (listen_again_ms_ > 0 && now >= listen_again_ms_) {
    listen_again_ms_ = 0;
    for (size_t r = 0; r < ports_.size(); ++r) watch(ports_[r].sockets.listener, kListenerId + r, EPOLLIN, false);
  }
  std::vector<uint64_t> late;
  status_.expire(now);
  bool waiting = listen_again_ms_ > 0 || status_.busy();
  for (const auto& [id, conn] : conns_) {
    if (conn->is_open() || conn->stage() == Conn::Stage::closed) continue;
    waiting = true;
    if (now >= conn->deadline_ms()) late.push_back(id);
  }
  for (const uint64_t id : late) {
    auto it = conns_.find(id);
    if (it == conns_.end()) continue;
    it->second->fail(it->second->stage() == Conn::Stage::connecting ? "no answer to the connection attempt"
                                                                   : "the handshake did not finish in time",
                     ConnEnd::here);
  }
  if (!waiting) next_expire_ms_ = now + kIdleTickMs;
}

Conn* Transport::dial(int rail, const Address& to, Hello hello, const std::string& key, ConnUser* user, int slot,
                      std::string* error) {
  const RailPort& port = ports_[static_cast<size_t>(rail)];
  try {
    const Address from = current_address(port.address, port.config.device);
    const int fd = ::ftar::dial(from, to, port.config.device, options_.congestion);
    const uint64_t id = next_id_++;
    try {
      conns_[id] = std::make_unique<Conn>(*this, fd, rail, id, std::move(hello), key, user, slot);
    } catch (...) {
      ::close(fd);
      throw;
    }
    next_expire_ms_ = std::min(next_expire_ms_, now_ms() + kExpireEveryMs);
    return conns_[id].get();
  } catch (const std::exception& e) {
    *error = e.what();
    return nullptr;
  }
}

Conn* Transport::find(uint64_t id) const {
  auto it = conns_.find(id);
  return it == conns_.end() ? nullptr : it->second.get();
}

void Transport::retire(uint64_t id) {
  auto it = conns_.find(id);
  if (it == conns_.end()) return;
  retired_.push_back(std::move(it->second));
  conns_.erase(it);
}

void Transport::proven(Conn& conn) { on_proven_(conn); }

void Transport::refused(const Conn& conn, const std::string& reason) {
  const Address peer = conn.peer_address();
  if (!on_refused_ || peer.length == 0 || refused_hosts_.size() >= kMaxStrangers) return;
  if (refused_hosts_.insert(peer.host()).second) on_refused_(peer.host(), reason);
}

}  // namespace ftar
