// See comm.h.
#include "comm.h"

#include <mutex>

#include "core.h"

namespace ftar::nccl {

Comm::Comm(Core& core) : core_(core) {
  for (Request& r : requests_) r.comm = this;
}

Request* Comm::take() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    Request& r = requests_[(next_ + i) % requests_.size()];
    if (r.state.load(std::memory_order_acquire) != Request::free) continue;
    next_ = (next_ + i + 1) % requests_.size();
    r.bytes.store(0, std::memory_order_relaxed);
    r.state.store(Request::posted, std::memory_order_relaxed);
    return &r;
  }
  return nullptr;
}

void Comm::progress() {
  const std::unique_lock lock(core_.transport().mutex(), std::try_to_lock);
  if (lock.owns_lock()) link().progress();
}

void Comm::fail(Result error, const std::string& reason) {
  if (error_.load(std::memory_order_relaxed) != kSuccess) return;
  link().close(reason, true);
  error_.store(error, std::memory_order_release);
}

std::string Comm::describe(int slot) {
  const LinkRail& rail = link().rails()[static_cast<size_t>(slot)];
  const std::string peer = rail.remote.length > 0 ? rail.remote.host() : "a peer";
  return (link().sender() ? "to " : "from ") + peer + " by " + link().rail_name(slot);
}

// What is wrong with the rails although they work, once for each rail and peer: a peer has many connections.
void Comm::link_ready(LinkEnd& link) {
  if (link.rails().size() == 1 && !core_.one_rail()) {
    core_.warn_once("unprotected " + describe(0), describe(0) + ": unprotected: the link has one rail and dies with its NIC or cable");
  }
  for (int slot = 0; slot < static_cast<int>(link.rails().size()); ++slot) {
    if (const std::string text = link.mtu_difference(slot); !text.empty()) link_warns(link, slot, text);
  }
}

void Comm::link_warns(LinkEnd&, int slot, const std::string& text) {
  core_.warn_once(describe(slot) + text.substr(0, 8), describe(slot) + ": " + text);
}

void Comm::link_rail(LinkEnd&, const RailChange& change) {
  core_.logger().queue(kLogInfo, describe(change.rail) + ": " + name(change.to) + ": " + change.reason);
}

void Comm::link_moved(LinkEnd& link, int slot, const std::string& reason) {
  // Every connection begins with a move: no news.
  if (link.resumes() > 0) core_.logger().queue(kLogInfo, describe(slot) + ": carries the data: " + reason);
}

void Comm::link_unreachable(LinkEnd& link, const std::string& reason) {
  const char* hint = link.ready() ? "" : "; it was never made: is the peer alive, is there a route, and have both the same FTAR_TOKEN_FILE?";
  core_.logger().queue(kLogWarn, describe(0) + ": " + reason + "; the connection is given up (FTAR_NET_TIMEOUT_S)" + hint);
  fail(kRemoteError, "could not be reached: " + reason);
}

void Comm::link_over(LinkEnd& link, const std::string& reason, bool left) {
  // A peer that closes in good order is no news: NCCL knows what it does. Whoever still waits gets the error.
  core_.logger().queue(left && link.ready() ? kLogInfo : kLogWarn, describe(0) + ": the peer " + reason);
  error_.store(kRemoteError, std::memory_order_release);
}

SendComm::SendComm(Core& core, LinkName name, std::vector<LinkRail> rails)
    : Comm(core), link_(core.transport(), *this, std::move(name), std::move(rails), [this](const OutMessage&) {
        posted_.pop_front()->state.store(Request::done, std::memory_order_release);
      }) {}

Request* SendComm::send(const void* data, uint64_t bytes) {
  Request* r = take();
  if (r == nullptr) return nullptr;
  r->bytes.store(bytes, std::memory_order_relaxed);
  posted_.push_back(r);
  OutMessage m;
  m.data = static_cast<const std::byte*>(data);
  m.bytes = bytes;
  link_.send(std::move(m));
  link_.pump(true);
  return r;
}

RecvComm::RecvComm(Core& core, LinkName name, std::vector<LinkRail> rails, Listener* listener)
    : Comm(core), listener_(listener), link_(core.transport(), *this, std::move(name), std::move(rails), *this) {}

void RecvComm::link_ready(LinkEnd& link) {
  Comm::link_ready(link);
  if (listener_ != nullptr) core_.established(*this, *listener_);
}

Request* RecvComm::receive(void* into, uint64_t bytes) {
  Request* r = take();
  if (r == nullptr) return nullptr;
  posted_.push_back({r, static_cast<std::byte*>(into), bytes});
  if (posted_.size() == 1 || link_.waits()) link_.places_changed(true);
  return r;
}

Placement RecvComm::place(const FrameHeader& message) {
  const uint64_t at = message.seq - first_;
  if (at >= posted_.size()) return {Placement::Kind::later, nullptr, nullptr};
  const Place& p = posted_[at];
  if (message.total <= p.bytes) return {Placement::Kind::here, p.into, nullptr};
  const std::string reason = "a message of " + std::to_string(message.total) + " bytes met a receive of " +
                             std::to_string(p.bytes) + " bytes";
  core_.logger().queue(kLogWarn, describe(0) + ": " + reason);
  fail(kInvalidUsage, reason);
  return {Placement::Kind::refused, nullptr, "the receive is too small"};
}

void RecvComm::received(const FrameHeader& message) {
  Request* r = posted_.pop_front().request;
  ++first_;
  r->bytes.store(message.total, std::memory_order_relaxed);
  r->state.store(Request::done, std::memory_order_release);
}

}  // namespace ftar::nccl
