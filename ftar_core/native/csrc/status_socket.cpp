// See status_socket.h.
#include "status_socket.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "forks.h"
#include "link.h"
#include "transport.h"

namespace ftar {

namespace {
constexpr size_t kMaxReaders = 4;
constexpr double kStalledMs = 1000;
constexpr double kReaderMs = 5000;
constexpr size_t kMaxChanges = 256;
constexpr int kMaxNames = 64;  // of one process: an engine and a plugin, and what a pid namespace may add
}  // namespace

void StatusSocket::open(About about) {
  about_ = std::move(about);
  const char* rank = ::getenv("RANK");
  rank_ = rank == nullptr ? "" : rank;
  opened_ms_ = Transport::now_ms();
  listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (listener_ < 0) return;
  close_in_children(listener_);
  for (int n = 0; n < kMaxNames; ++n) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string name = "ftar-links/" + std::to_string(::getpid()) + "/" + std::to_string(n);
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (::bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) == 0) {
      if (::listen(listener_, 16) != 0) break;
      try {
        transport_.watch(listener_, kFirstId, EPOLLIN, true);
      } catch (const std::exception&) {
        break;
      }
      return;
    }
    if (errno != EADDRINUSE) break;
  }
  close();
}

void StatusSocket::close() {
  while (!readers_.empty()) drop(readers_.begin()->first);
  if (listener_ >= 0) {
    keep_in_children(listener_);
    ::close(listener_);
  }
  listener_ = -1;
  listen_again_ms_ = 0;
}

const char* StatusSocket::direction(const LinkEnd& link) { return link.sender() ? "out" : "in"; }

void StatusSocket::add(const LinkEnd& link) {
  const uint64_t id = next_link_++;
  links_[id] = {&link, std::vector<double>(link.rails().size(), -1)};
  ids_[&link] = id;
}

void StatusSocket::remove(const LinkEnd& link) {
  const auto it = ids_.find(&link);
  if (it == ids_.end()) return;
  links_.erase(it->second);
  ids_.erase(it);
}

void StatusSocket::note(const LinkEnd& link, Change change) {
  change.at_ms = Transport::now_ms();
  for (auto it = changes_.rbegin(); it != changes_.rend() && change.at_ms - it->at_ms < kMergeMs; ++it) {
    if (it->kind != change.kind || it->event != change.event || it->rail != change.rail || it->from != change.from ||
        it->to != change.to) {
      continue;
    }
    ++it->links;
    it->detect_ms = std::max(it->detect_ms, change.detect_ms);
    if (it->peer != link.peer()) it->peer.clear();
    if (it->direction != direction(link)) it->direction = "";
    return;
  }
  change.seq = next_seq_++;
  change.peer = link.peer();
  change.direction = direction(link);
  changes_.push_back(std::move(change));
  if (changes_.size() > kMaxChanges) changes_.pop_front();
}

void StatusSocket::changed(const LinkEnd& link, const RailChange& c) {
  if (const auto it = ids_.find(&link); it != ids_.end() && c.to == RailState::down) {
    links_[it->second].detect_ms[static_cast<size_t>(c.rail)] = c.detect_ms;
  }
  // A link that was just made is no news, and attempts to get a rail back come many times a second.
  if (c.event == RailEvent::first_connected || c.to == RailState::probing) return;
  Change change;
  change.kind = "rail";
  change.event = static_cast<int>(c.event);
  change.rail = link.rail_name(c.rail);
  change.from = ftar::name(c.from);
  change.to = ftar::name(c.to);
  change.reason = c.reason;
  change.detect_ms = c.detect_ms;
  note(link, std::move(change));
}

void StatusSocket::moved(const LinkEnd& link, int slot, const std::string& reason) {
  Change change;
  change.kind = "moved";
  change.rail = link.rail_name(slot);
  change.reason = reason;
  note(link, std::move(change));
}

void StatusSocket::dead(const LinkEnd& link, const std::string& reason) {
  Change change;
  change.kind = "dead";
  change.reason = reason;
  note(link, std::move(change));
}

void StatusSocket::back(const LinkEnd& link) {
  Change change;
  change.kind = "back";
  note(link, std::move(change));
}

void StatusSocket::unreachable(const LinkEnd& link, const std::string& reason) {
  Change change;
  change.kind = "unreachable";
  change.reason = reason;
  note(link, std::move(change));
}

void StatusSocket::over(const LinkEnd& link, const std::string& reason) {
  Change change;
  change.kind = "over";
  change.reason = reason;
  note(link, std::move(change));
}

void StatusSocket::on_event(uint64_t id) {
  if (id == kFirstId) return accept_all();
  serve(id);
}

void StatusSocket::accept_all() {
  for (int i = 0; i < 16; ++i) {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        transport_.watch(listener_, kFirstId, 0, false);
        listen_again_ms_ = Transport::now_ms() + 100;
      }
      return;
    }
    ucred user{};
    socklen_t size = sizeof user;
    const bool known = ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &user, &size) == 0;
    const bool stranger = !known || (user.uid != 0 && user.uid != ::geteuid());
    if (readers_.size() >= kMaxReaders) {
      const auto other = std::find_if(readers_.begin(), readers_.end(), [](const auto& r) { return r.second.stranger; });
      if (stranger || other == readers_.end()) {
        ::close(fd);
        continue;
      }
      drop(other->first);
    }
    const uint64_t id = kFirstId + 1 + next_reader_++ % (kLastId - kFirstId);
    Reader reader;
    reader.fd = fd;
    reader.stranger = stranger;
    reader.since_ms = reader.took_ms = Transport::now_ms();
    try {
      reader.links.reserve(links_.size());
      for (const auto& [link, entry] : links_) reader.links.push_back(link);
      transport_.watch(fd, id, EPOLLOUT, true);
      readers_[id] = std::move(reader);
      close_in_children(fd);
    } catch (const std::exception&) {  // no memory, no room in epoll
      ::close(fd);
    }
  }
}

void StatusSocket::drop(uint64_t id) {
  const auto it = readers_.find(id);
  if (it == readers_.end()) return;
  keep_in_children(it->second.fd);
  ::close(it->second.fd);
  readers_.erase(it);
}

void StatusSocket::serve(uint64_t id) {
  const auto it = readers_.find(id);
  if (it == readers_.end()) return;
  Reader& r = it->second;
  if (r.sent == r.out.size()) write_slice(r);
  const ssize_t n = ::send(r.fd, r.out.data() + r.sent, r.out.size() - r.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n > 0) {
    r.sent += static_cast<size_t>(n);
    r.took_ms = Transport::now_ms();
  }
  const bool gone = n < 0 && errno != EAGAIN && errno != EINTR;
  if (gone || (r.last && r.sent == r.out.size())) drop(id);  // the rest comes with the next EPOLLOUT
}

void StatusSocket::expire(double now) {
  if (listen_again_ms_ > 0 && now >= listen_again_ms_ && listener_ >= 0) {
    listen_again_ms_ = 0;
    transport_.watch(listener_, kFirstId, EPOLLIN, false);
  }
  std::vector<uint64_t> late;
  for (const auto& [id, reader] : readers_) {
    if (now - reader.took_ms >= kStalledMs || now - reader.since_ms >= kReaderMs) late.push_back(id);
  }
  for (const uint64_t id : late) drop(id);
}

}  // namespace ftar
