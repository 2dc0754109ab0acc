// The sending end of a link. See link.h.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>

#include "link.h"

namespace ftar {

namespace {
constexpr uint64_t kMaxFrame = 4u << 20;   // then a notice gets its turn between two frames of a long message
constexpr double kStallCheckMs = 100;
constexpr double kStalledMs = 1000;  // five times TCP's shortest retransmission timeout
}  // namespace

SendLink::SendLink(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, Complete complete)
    : LinkEnd(transport, owner, std::move(name), std::move(rails), true), complete_(std::move(complete)) {}

void SendLink::send(OutMessage message) { messages_.push_back(std::move(message)); }

void SendLink::pump(bool now) {
  if (closed_ || !streaming_) return;
  if (Conn* c = open_conn(active_)) now ? c->flush() : c->kick_later();
}

bool SendLink::next_frame(Conn& conn, FrameHeader* out, const std::byte** payload) {
  if (closed_ || !streaming_ || conn.slot() != active_) return false;
  const uint64_t at = next_seq_ - base_seq_;
  if (at >= messages_.size()) return false;
  const OutMessage& m = messages_[at];
  if (next_offset_ == 0) {
    if (returning_) return false;
    const auto window = static_cast<uint64_t>(transport_.options().window_bytes);
    if (in_flight_ > 0 && in_flight_ + m.bytes > window) return false;
    in_flight_ += m.bytes;
  }
  FrameHeader h = header(FrameType::data);
  h.flags = m.ack_soon ? kAckSoon : 0;
  h.seq = next_seq_;
  h.offset = next_offset_;
  h.total = m.bytes;
  h.length = static_cast<uint32_t>(std::min<uint64_t>(kMaxFrame, m.bytes - next_offset_));
  h.step = m.step;
  h.bucket = m.bucket;
  h.part = m.part;
  *payload = m.data + next_offset_;
  *out = h;
  next_offset_ += h.length;
  if (next_offset_ == m.bytes) {
    ++next_seq_;
    next_offset_ = 0;
  }
  return true;
}

Placement SendLink::data_begins(Conn&, const FrameHeader&) {
  return {Placement::Kind::refused, nullptr, "data against the direction of the link"};
}

void SendLink::batch_done(Conn& conn) {
  if (!closed_) conn.flush();
}

const char* SendLink::own_control(Conn& conn, const FrameHeader& h) {
  if (h.type != FrameType::ack && h.type != FrameType::resume) return "a frame that only a sender may send";
  // What the receiver said before it heard of our change of rail is stale, not wrong.
  if (h.generation != generation_ || conn.slot() != active_) return nullptr;
  if (h.type == FrameType::resume) return resume(h);
  if (!streaming_) return "an acknowledgement before the receiver said where to go on";
  if (h.seq > next_seq_) return "an acknowledgement of what was never sent";
  acknowledged(h.seq);
  return nullptr;
}

const char* SendLink::resume(const FrameHeader& h) {
  if (streaming_) return "a second answer to one change of rail";
  const bool reached = h.seq < next_seq_ || (h.seq == next_seq_ && h.offset <= next_offset_);
  if (h.seq < base_seq_ || !reached) return "the receiver claims bytes that were never sent";
  acknowledged(h.seq);
  if (closed_) return nullptr;
  if (h.offset != 0 && (messages_.empty() || h.offset >= messages_.front().bytes)) return "an impossible place to go on";
  next_seq_ = h.seq;
  next_offset_ = h.offset;
  in_flight_ = h.offset != 0 ? messages_.front().bytes : 0;
  streaming_ = true;
  maybe_return();  // a better rail may have come up while the answer was on its way
  return nullptr;
}

void SendLink::peer_completed(uint64_t seq) {
  if (seq <= next_seq_) acknowledged(seq);
}

void SendLink::acknowledged(uint64_t seq) {
  while (base_seq_ < seq && !closed_) {
    const OutMessage done = std::move(messages_.front());
    messages_.pop_front();
    ++base_seq_;
    in_flight_ -= std::min(in_flight_, done.bytes);
    complete_(done);
  }
  if (!closed_) maybe_return();
}

// A new generation on another rail.
void SendLink::change_to(int slot, bool planned, const std::string& reason) {
  const bool first = generation_ == 0;
  in_flight_since_ms_ = -1;
  ++generation_;
  active_ = slot;
  streaming_ = false;
  returning_ = false;
  if (!first && !planned) ++resumes_;
  FrameHeader h = header(FrameType::change);
  h.flags = planned ? kPlanned : 0;
  Conn* c = open_conn(slot);
  c->send_control(h);
  if (!first) transport_.status().moved(*this, slot, reason);
  owner_.link_moved(*this, slot, reason);
  c->flush();
}

void SendLink::rails_changed(double now) {
  if (closed_) return;
  const int best = health_.preferred();
  if (open_conn(active_) != nullptr && health_.rail(active_).state == RailState::up) {
    returning_ = best >= 0 && best < active_;
    maybe_return();
    if (!closed_) flush_all();
    return;
  }
  const int lost = active_;
  active_ = -1;
  streaming_ = false;
  returning_ = false;
  if (best >= 0 && open_conn(best) != nullptr) {
    bool wait = false;
    if (generation_ == 0 && now - started_ms_ < transport_.options().heartbeat_ms) {
      // Do not start on the backup only because its handshake was a moment faster.
      for (int i = 0; i < best; ++i) {
        const RailPort& port = transport_.ports()[static_cast<size_t>(rails_[static_cast<size_t>(i)].local)];
        wait = wait || port.carrier;
      }
    }
    if (!wait) {
      change_to(best, false,
                generation_ == 0 ? "the link's first rail"
                : lost >= 0      ? "took over from " + rail_name(lost) + ": " + health_.rail(lost).reason
                                 : "the first rail that works again");
    }
  }
  if (!closed_) flush_all();
}

void SendLink::maybe_return() {
  if (closed_ || !returning_ || !streaming_ || started()) return;
  const Conn* c = open_conn(active_);
  const int best = health_.preferred();
  if (c == nullptr || c->sending_frame() || best < 0 || best >= active_ || open_conn(best) == nullptr) return;
  change_to(best, true, "traffic returned to the preferred rail");
}

// Heartbeats are small: they pass where full segments do not (a wrong MTU), and they know nothing of a TCP that backed
// off for seconds while the rail was dead. TCP_USER_TIMEOUT would also end connections whose receiver has no place yet
// (tcp(7): it counts a zero window), so ask TCP itself: segments in flight at every look, and nothing acknowledged for a
// second. One look is not enough: on a connection that was idle the last acknowledgement is old by rights.
void SendLink::check_stalled(double now) {
  if (now < next_stall_check_ms_) return;
  next_stall_check_ms_ = now + kStallCheckMs;
  const Conn* c = open_conn(active_);
  tcp_info info{};
  socklen_t size = sizeof info;
  if (c == nullptr || !started() || ::getsockopt(c->fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
      info.tcpi_unacked == 0) {
    in_flight_since_ms_ = -1;
    return;
  }
  if (in_flight_since_ms_ < 0) in_flight_since_ms_ = now;
  const double stalled = std::min(now - in_flight_since_ms_, static_cast<double>(info.tcpi_last_ack_recv));
  if (stalled < kStalledMs) return;
  in_flight_since_ms_ = -1;
  char reason[96];
  std::snprintf(reason, sizeof reason, "TCP has had no acknowledgement for %.0f ms, with %u segments in flight", stalled,
                info.tcpi_unacked);
  const int slot = active_;
  drop_conn(slot);
  health_.closed(slot, reason, now);
  settle(now);
}

void SendLink::tick_more(double now) {
  for (int i = 0; i < static_cast<int>(rails_.size()) && !closed_; ++i) {
    if (conns_[static_cast<size_t>(i)] != nullptr || !health_.may_connect(i, now)) continue;
    health_.connecting(i, now);
    const LinkRail& rail = rails_[static_cast<size_t>(i)];
    Hello hello;
    hello.epoch = name_.epoch;
    hello.from = name_.from;
    hello.to = name_.to;
    hello.from_incarnation = name_.from_incarnation;
    hello.to_incarnation = name_.to_incarnation;
    hello.udp_port = static_cast<uint16_t>(transport_.ports()[static_cast<size_t>(rail.local)].sockets.port);
    hello.rail = rail.name;
    std::string error;
    conns_[static_cast<size_t>(i)] = transport_.dial(rail.local, rail.remote, std::move(hello), key_, this, i, &error);
    if (conns_[static_cast<size_t>(i)] == nullptr) health_.connect_failed(i, error, now);
  }
  check_stalled(now);
  maybe_return();
  if (!closed_ && active_ < 0) rails_changed(now);
}

}  // namespace ftar
