// The sending end of a link. See link.h.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>

#include "link.h"

namespace ftar {

namespace {
constexpr uint64_t kMaxFrame = 4u << 20;   // then a notice gets its turn between two frames of a long message
constexpr int kUnsentBytes = 128 << 10;
constexpr double kMeasureMs = 10;
constexpr double kStallCheckMs = 100;
constexpr double kSuspectMs = 200;      // TCP's shortest retransmission timeout
constexpr double kSuspectCheckMs = 20;
constexpr double kStallsApartMs = 5000;
constexpr double kStalledMs = 1000;  // five times TCP's shortest retransmission timeout
}  // namespace

SendLink::SendLink(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, Complete complete)
    : LinkEnd(transport, owner, std::move(name), std::move(rails), true),
      complete_(std::move(complete)),
      box_(rails_.size(), static_cast<uint64_t>(transport.options().window_bytes)),
      stripe_(transport.options().mode == "stripe"),
      meters_(rails_.size()),
      in_flight_since_ms_(rails_.size(), -1) {}

void SendLink::send(OutMessage message) { box_.push(std::move(message)); }

void SendLink::pump(bool now) {
  if (now) return flush_carrying();
  for (uint64_t left = carrying_; left != 0; left &= left - 1) {
    if (Conn* c = open_conn(std::countr_zero(left))) c->kick_later();
  }
}

void SendLink::flush_carrying() {
  for (uint64_t left = carrying_; left != 0 && !closed_; left &= left - 1) {
    if (Conn* c = open_conn(std::countr_zero(left))) c->flush();
  }
}

bool SendLink::next_frame(Conn& conn, FrameHeader* out, const std::byte** payload) {
  if (closed_ || !carries(conn.slot())) return false;
  const uint64_t most = stripe_ ? share(conn) : kMaxFrame;
  if (most == 0 || !box_.next(conn.slot(), most, out, payload)) return false;
  out->tag = tag_;
  return true;
}

uint64_t SendLink::share(const Conn& conn) {
  uint64_t queued = 0;
  uint64_t head = 0;
  if (!box_.waiting(&queued, &head)) return 0;
  loads_.clear();
  int me = -1;
  for (uint64_t left = carrying_; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    const Conn* c = open_conn(slot);
    if (c == nullptr) continue;
    if (c == &conn) me = static_cast<int>(loads_.size());
    int outstanding = 0;  // sent and not acknowledged, and not sent
    ::ioctl(c->fd(), SIOCOUTQ, &outstanding);
    loads_.push_back({meters_[static_cast<size_t>(slot)].rate(), static_cast<uint64_t>(outstanding) + c->unsent()});
  }
  const uint64_t most = stripe_share(loads_, me, queued, head);
  if (most == 0 && loads_[static_cast<size_t>(me)].backlog == 0) declined_ |= uint64_t{1} << conn.slot();
  return most;
}

// How fast the rails are. The time in which the receiver had no room is the receiver's, not the rail's.
void SendLink::measure() {
  for (uint64_t left = carrying_; left != 0; left &= left - 1) {
    const int slot = std::countr_zero(left);
    const Conn* c = open_conn(slot);
    tcp_info info{};
    socklen_t size = sizeof info;
    if (c == nullptr || ::getsockopt(c->fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    const uint64_t busy_us = info.tcpi_busy_time - std::min(info.tcpi_busy_time, info.tcpi_rwnd_limited);
    meters_[static_cast<size_t>(slot)].sample(info.tcpi_bytes_acked, static_cast<double>(busy_us) * 1e-3);
    if ((declined_ >> slot & 1) != 0) meters_[static_cast<size_t>(slot)].doubt();
  }
  declined_ = 0;
}

Placement SendLink::data_begins(Conn&, const FrameHeader&) {
  return {Placement::Kind::refused, nullptr, "data against the direction of the link"};
}

void SendLink::batch_done(Conn&) { flush_carrying(); }

void SendLink::ask(Conn& conn, const Outbox::Question& question) {
  FrameHeader h = header(FrameType::lost);
  h.rail = static_cast<uint16_t>(question.rail);
  h.generation = question.generation;
  h.step = box_.keep_from(question.rail);
  conn.send_control(h);
}

void SendLink::conn_attached(int slot) {
  Conn* c = open_conn(slot);
  FrameHeader h = header(FrameType::open);
  h.generation = box_.opened(slot);
  h.step = box_.keep_from(slot);
  h.total = box_.window();
  c->send_control(h);
  if (stripe_) {
    meters_[static_cast<size_t>(slot)] = RateMeter{};
    // Ask a rail late: what its socket holds cannot go by another one.
    const int lowat = kUnsentBytes;
    ::setsockopt(c->fd(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lowat, sizeof lowat);
  }
  // Whoever was asked before may have died with the answer.
  for (const Outbox::Question& q : box_.questions()) ask(*c, q);
}

void SendLink::conn_gone(int slot) {
  in_flight_since_ms_[static_cast<size_t>(slot)] = -1;
  if (carries(slot)) {
    carrying_ &= ~(uint64_t{1} << slot);
    lost_carriers_ |= uint64_t{1} << slot;
  }
  const uint32_t generation = box_.closed(slot);
  if (generation == 0) return;
  if (box_.questions().size() > Outbox::kMaxQuestions) return;  // tick_more ends the link
  // Every connection is asked: one that looks alive may be the next to be found dead.
  for (int i = 0; i < static_cast<int>(rails_.size()); ++i) {
    if (Conn* c = open_conn(i); c != nullptr && box_.generation(i) != 0) ask(*c, {slot, generation});
  }
}

const char* SendLink::own_control(Conn&, const FrameHeader& h) {
  if (h.type != FrameType::ack && h.type != FrameType::have) return "a frame that only a sender may send";
  if (h.seq > box_.begun()) return "an acknowledgement of what was never sent";
  acknowledged(h.seq);
  if (closed_ || h.type == FrameType::ack) return nullptr;
  if (const std::string problem = box_.answered(h); !problem.empty()) over("sent " + problem, false);
  return nullptr;
}

void SendLink::peer_completed(uint64_t seq) {
  if (seq <= box_.begun()) acknowledged(seq);
}

void SendLink::acknowledged(uint64_t seq) {
  OutMessage done;
  while (!closed_ && box_.complete(seq, &done)) {
    stalled_since_ms_ = -1;
    complete_(done);
  }
}

uint64_t SendLink::chosen(double now) const {
  uint64_t up = 0;
  for (int i = 0; i < static_cast<int>(rails_.size()); ++i) {
    if (health_.rail(i).state != RailState::up || open_conn(i) == nullptr) continue;
    // Do not start on the backup only because its handshake was a moment faster.
    for (int better = 0; better < i && up == 0 && !ever_carried_ && !stripe_; ++better) {
      const RailPort& port = transport_.ports()[static_cast<size_t>(rails_[static_cast<size_t>(better)].local)];
      if (port.carrier && now - started_ms_ < transport_.options().heartbeat_ms) return 0;
    }
    up |= uint64_t{1} << i;
    if (!stripe_) break;
  }
  return up;
}

void SendLink::choose(double now) {
  const uint64_t want = chosen(now);
  if (want == carrying_ && (want == 0 || lost_carriers_ == 0)) return;
  const bool first = !ever_carried_;
  const bool planned = lost_carriers_ == 0;
  uint64_t news = want & ~carrying_;
  carrying_ = want;
  if (want == 0) return;
  ever_carried_ = true;
  std::string reason = first ? "the link's first rail" : stripe_ ? "carries its share" : "traffic returned to the preferred rail";
  if (!planned) {
    const int lost = std::countr_zero(lost_carriers_);
    reason = carries(lost) ? "the first rail that works again" : "took over from " + rail_name(lost) + ": " + health_.rail(lost).reason;
    if (news == 0) news = want;  // those that are left carry more
    ++resumes_;
    lost_carriers_ = 0;
  }
  FrameHeader h = header(FrameType::carry);
  h.total = want;
  h.flags = planned ? kPlanned : 0;
  open_conn(std::countr_zero(want))->send_control(h);
  for (; news != 0 && !closed_; news &= news - 1) {
    const int slot = std::countr_zero(news);
    if (!first) transport_.status().moved(*this, slot, reason);
    owner_.link_moved(*this, slot, reason);
  }
}

void SendLink::rails_changed(double now) {
  if (closed_) return;
  choose(now);
  if (!closed_) flush_all();
}

// Heartbeats are small: they pass where full segments do not (a wrong MTU), and they know nothing of a TCP that backed
// off for seconds while the rail was dead. TCP_USER_TIMEOUT would also end connections whose receiver has no place yet
// (tcp(7): it counts a zero window), so ask TCP itself: segments in flight at every look, and nothing acknowledged for a
// second. One look is not enough: on a connection that was idle the last acknowledgement is old by rights. A fifth of
// that, and a retransmission that timed out, make the rail suspect: then packets of TCP's size are tried (SizeTest), which
// tells a wrong MTU from a busy rail in half a second.
void SendLink::check_stalled(double now) {
  if (now < next_stall_check_ms_) return;
  next_stall_check_ms_ = now + kStallCheckMs;
  for (int i = 0; i < static_cast<int>(rails_.size()) && !closed_; ++i) check_stalled(i, now);
}

void SendLink::check_stalled(int slot, double now) {
  double& since = in_flight_since_ms_[static_cast<size_t>(slot)];
  const Conn* c = open_conn(slot);
  tcp_info info{};
  socklen_t size = sizeof info;
  if (c == nullptr || !box_.unacknowledged(slot) || ::getsockopt(c->fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
      info.tcpi_unacked == 0) {
    since = -1;
    forget_sizes(slot);
    return;
  }
  if (since < 0) since = now;
  const double stalled = std::min(now - since, static_cast<double>(info.tcpi_last_ack_recv));
  if (stalled < kSuspectMs) return forget_sizes(slot);
  const auto p = static_cast<size_t>(slot);
  const Address& to = rails_[p].remote;
  // What ping(8) and a beat have to add to reach the size of TCP's packets.
  const size_t header = to.family() == AF_INET6 ? 48 : 28;
  const size_t packet = info.tcpi_snd_mss + (to.family() == AF_INET6 ? 60u : 40u) + ((info.tcpi_options & TCPI_OPT_TIMESTAMPS) != 0 ? 12u : 0u);
  if (stalled < kStalledMs) {
    if (info.tcpi_retransmits == 0) return;
    next_stall_check_ms_ = now + kSuspectCheckMs;
    test_size(slot, packet - header, now);
    if (!sizes(slot).failed()) return;
  }
  const bool small_pass = !sizes(slot).passed() && (sizes(slot).failed() || health_.heard_for(slot, now) >= kStalledMs / 2);
  std::string reason = "TCP has had no acknowledgement for " + std::to_string(static_cast<int>(stalled)) + " ms, with " +
                       std::to_string(info.tcpi_unacked) + " segments in flight";
  if (small_pass) {
    reason += ", and small packets pass: check the MTU (ping -M do -s " + std::to_string(packet - header) + " " + to.host() + ")";
  }
  if (stalled_since_ms_ < 0 || now - last_stall_ms_ > kStallsApartMs) stalled_since_ms_ = now - stalled;
  last_stall_ms_ = now;
  drop_conn(slot);
  forget_sizes(slot);
  // Small packets would prove the rail, and it would stall again: let those do it that did not pass.
  if (small_pass) prove_with(slot, packet - header);
  health_.closed(slot, reason, now);
  settle(now);
  if (closed_) return;
  if (small_pass) owner_.link_warns(*this, slot, reason);
  const double nothing_for = now - stalled_since_ms_;
  // The other rails had their chance by then.
  if (!closed_ && nothing_for >= std::max<double>(transport_.options().unreachable_ms, 3 * kStalledMs)) {
    unreachable("no message has come through for " + std::to_string(static_cast<int>(nothing_for)) + " ms (rail " +
                std::to_string(slot) + ": " + reason + ")");
  }
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
  if (stripe_ && !closed_) {
    if (now >= next_measure_ms_) {
      next_measure_ms_ = now + kMeasureMs;
      measure();
    }
    flush_carrying();  // who declined before may be the best one now
  }
  if (!closed_ && box_.questions().size() > Outbox::kMaxQuestions) {
    over("did not answer what came on 256 connections, one after the other", false);
  }
  if (!closed_ && carrying_ == 0) rails_changed(now);
}

}  // namespace ftar
