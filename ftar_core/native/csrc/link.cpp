// What both ends of a link share. See link.h; the sender is link_send.cpp, the receiver link_recv.cpp.
#include "link.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <bit>
#include <stdexcept>

namespace ftar {

namespace {
constexpr int kRefusals = 5;
constexpr double kDeadToldMs = 1000;
constexpr double kDeadToldNewMs = 5000;  // of a link that was never made: its peer may be starting

Hello hello_of(const LinkName& name) {
  Hello h;
  h.epoch = name.epoch;
  h.from = name.from;
  h.to = name.to;
  h.from_incarnation = name.from_incarnation;
  h.to_incarnation = name.to_incarnation;
  return h;
}
}  // namespace

LinkEnd::LinkEnd(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, bool sender)
    : transport_(transport),
      owner_(owner),
      name_(std::move(name)),
      key_(name_.key.empty() ? transport.key() : name_.key),
      rails_(std::move(rails)),
      sender_(sender),
      tag_(link_tag(key_, hello_of(name_))),
      health_(static_cast<int>(rails_.size()), transport.options(), Transport::now_ms()),
      conns_(rails_.size(), nullptr),
      started_ms_(Transport::now_ms()),
      per_rail_(rails_.size()) {
  transport_.paths().add_end(end_tag(tag_, sender_), key_, this);
  transport_.status().add(*this);
  for (size_t i = 0; i < rails_.size(); ++i) per_rail_[i].addresses = port(i).version;
}

LinkEnd::~LinkEnd() { close("closed", true); }

const std::string& LinkEnd::rail_name(int slot) const {
  return transport_.ports()[static_cast<size_t>(rails_[static_cast<size_t>(slot)].local)].config.name;
}

Conn* LinkEnd::open_conn(int slot) const {
  if (slot < 0) return nullptr;
  Conn* c = conns_[static_cast<size_t>(slot)];
  return c != nullptr && c->is_open() ? c : nullptr;
}

FrameHeader LinkEnd::header(FrameType type) const {
  FrameHeader h;
  h.type = type;
  h.tag = tag_;
  return h;
}

LinkRailStat LinkEnd::stat(int slot, double now) const {
  const auto i = static_cast<size_t>(slot);
  LinkRailStat s{health_.rail(slot), carries(slot), per_rail_[i].bytes_before, health_.silent_ms(slot, now)};
  if (const Conn* c = conns_[i]) s.bytes += sender_ ? c->bytes_sent() : c->bytes_received();
  return s;
}

int LinkEnd::retransmits(int slot) const {
  const Conn* c = open_conn(slot);
  tcp_info info{};
  socklen_t size = sizeof info;
  if (c == nullptr || ::getsockopt(c->fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return static_cast<int>(info.tcpi_total_retrans);
}

void LinkEnd::drop_conn(int slot) {
  const auto i = static_cast<size_t>(slot);
  Conn* c = conns_[i];
  conns_[i] = nullptr;
  per_rail_[i].opened = false;
  leave_path(slot);
  if (c == nullptr) return;
  per_rail_[i].bytes_before += sender_ ? c->bytes_sent() : c->bytes_received();
  c->close(false);
  if (!closed_) conn_gone(slot);
}

void LinkEnd::drop_inquiries() {
  for (PerRail& r : per_rail_) {
    if (r.inquiry != nullptr) r.inquiry->close(false);
    r.inquiry = nullptr;
  }
}

void LinkEnd::flush_all() {
  for (size_t i = 0; i < conns_.size() && !closed_; ++i) {
    if (Conn* c = open_conn(static_cast<int>(i))) c->flush();
  }
}

void LinkEnd::close(const std::string& reason, bool left_epoch) {
  if (closed_) return;
  closed_ = true;
  carrying_ = 0;
  transport_.paths().remove_end(end_tag(tag_, sender_));
  transport_.status().remove(*this);
  drop_inquiries();
  FrameHeader bye = header(FrameType::goodbye);
  bye.flags = left_epoch ? kLeftEpoch : 0;
  bye.seq = complete_messages();
  for (size_t i = 0; i < conns_.size(); ++i) {
    Conn* c = conns_[i];
    conns_[i] = nullptr;
    if (c == nullptr) continue;
    per_rail_[i].bytes_before += sender_ ? c->bytes_sent() : c->bytes_received();
    if (c->is_open()) {
      c->send_control(bye, reason);
      // A goodbye cannot go into the middle of a data frame; the datagram says it there.
      const LinkRail& rail = rails_[i];
      transport_.paths().send_goodbye(rail.local, rail.remote, end_tag(tag_, sender_), key_, bye.seq, bye.flags);
    }
    leave_path(static_cast<int>(i));
    c->close(c->is_open() && !c->sending_frame());
  }
  ended();
}

void LinkEnd::over(const std::string& reason, bool left_epoch) {
  if (closed_) return;
  closed_ = true;
  carrying_ = 0;
  if (!left_epoch) transport_.status().over(*this, reason);
  transport_.paths().remove_end(end_tag(tag_, sender_));
  transport_.status().remove(*this);
  drop_inquiries();
  for (size_t i = 0; i < conns_.size(); ++i) drop_conn(static_cast<int>(i));
  ended();
  owner_.link_over(*this, reason, left_epoch);
}

void LinkEnd::attached(Conn& conn, double now) {
  const auto i = static_cast<size_t>(conn.slot());
  PerRail& r = per_rail_[i];
  r.opened = true;
  r.refusals = 0;
  r.next_proof_ms = 0;
  r.opened_ms = now;
  inquire_at_ms_ = -1;
  closed_reason_.clear();
  conn_attached(conn.slot());
  health_.connected(conn.slot(), now, r.proof_bytes == 0 ? "" : " of " + std::to_string(r.proof_bytes) + " bytes: small packets passed before, large ones did not");
  if (!sender_) tell_endpoints(conn);
  join_path(conn.slot(), now);
  settle(now);
  check_ready(now);
}

void LinkEnd::conn_open(Conn& conn) { attached(conn, Transport::now_ms()); }

void LinkEnd::conn_heard(Conn& conn) {
  if (conn.is_open()) health_.heard(conn.slot(), Transport::now_ms());
}

void LinkEnd::conn_closed(Conn& conn, const std::string& reason, ConnEnd end) {
  const auto i = static_cast<size_t>(conn.slot());
  PerRail& r = per_rail_[i];
  if (closed_) return;
  const double now = Transport::now_ms();
  const bool inquiry = r.inquiry == &conn;
  if (inquiry) r.inquiry = nullptr;
  if (end == ConnEnd::answered) inquire_at_ms_ = -1;
  if (end == ConnEnd::refused && first_up_ms_ >= 0 && !any_open()) {
    return over("closed all its connections (" + (closed_reason_.empty() ? reason : closed_reason_) + ")", false);
  }
  // With a connection left, the goodbye on that one says more: how many messages are complete.
  if (end == ConnEnd::over && !any_open()) return over(reason, true);
  r.refusals = end == ConnEnd::refused ? r.refusals + 1 : 0;
  if (first_up_ms_ < 0 && nobody_listens()) {
    return over("is gone: nobody listens there any more (" + std::to_string(kRefusals) + " attempts were refused on every rail)", false);
  }
  if (inquiry || conns_[i] != &conn) return;
  if (end == ConnEnd::version && first_up_ms_ < 0) return over(reason, false);
  const bool was_open = r.opened;
  drop_conn(conn.slot());
  if (was_open) {
    health_.closed(conn.slot(), reason, now);
  } else {
    const char* who = end == ConnEnd::version ? "the other side " : "";
    health_.connect_failed(conn.slot(), who + reason + " (" + rails_[i].remote.host() + ")", now);
  }
  if (was_open && end == ConnEnd::peer && !any_open()) {
    closed_reason_ = reason;
    inquire_at_ms_ = now;
    transport_.wake();
  }
  settle(now);
}

bool LinkEnd::any_open() const {
  return std::any_of(conns_.begin(), conns_.end(), [](const Conn* c) { return c != nullptr && c->is_open(); });
}

bool LinkEnd::nobody_listens() const {
  bool any = false;
  for (size_t i = 0; i < rails_.size(); ++i) {
    const bool carrier = port(i).carrier;
    if (carrier && per_rail_[i].refusals < kRefusals) return false;
    any = any || carrier;
  }
  return any;
}

void LinkEnd::inquire(double now) {
  if (inquire_at_ms_ < 0 || now < inquire_at_ms_) return;
  inquire_at_ms_ = now + std::min(10, transport_.options().probe_interval_ms);
  for (size_t i = 0; i < rails_.size() && !closed_; ++i) {
    const RailPort& p = port(i);
    if (per_rail_[i].inquiry != nullptr || !p.carrier) continue;
    std::string error;
    per_rail_[i].inquiry = transport_.dial(rails_[i].local, rails_[i].remote, Hello{}, key_, this, static_cast<int>(i), &error);
  }
}

void LinkEnd::settle(double now) {
  if (settling_ || closed_) return;
  settling_ = true;
  bool news = false;
  for (;;) {
    const std::vector<RailChange> changes = health_.take_changes();
    if (changes.empty()) break;
    news = true;
    for (const RailChange& change : changes) {
      if (change.to == RailState::up) prove_with(change.rail, 0);
      if (change.to == RailState::down) {
        drop_conn(change.rail);
        if (change.event != RailEvent::peer_notice) {
          FrameHeader notice = header(FrameType::notice);
          notice.rail = static_cast<uint16_t>(change.rail);
          for (size_t i = 0; i < conns_.size(); ++i) {
            if (Conn* c = open_conn(static_cast<int>(i))) c->send_control(notice, change.reason);
          }
        }
      }
      transport_.status().changed(*this, change);
      owner_.link_rail(*this, change);
      if (closed_) return;
    }
  }
  settling_ = false;
  if (news) rails_changed(now);
}

const char* LinkEnd::control(Conn& conn, const FrameHeader& h, std::string_view text) {
  if (h.tag != tag_) return "a frame of another link";
  if (h.type == FrameType::goodbye) {
    peer_completed(h.seq);
    over("said goodbye: " + std::string(text), (h.flags & kLeftEpoch) != 0);
    return nullptr;
  }
  if (h.type == FrameType::notice) {
    if (h.rail >= rails_.size()) return "a notice about a rail that does not exist";
    if (h.rail == conn.slot()) return "a notice about the rail it came on";
    const double now = Transport::now_ms();
    health_.notice(h.rail, std::string(text), now);
    settle(now);
    return nullptr;
  }
  if (h.type == FrameType::endpoint) return endpoint(h, std::string(text));
  return own_control(conn, h);
}

void LinkEnd::check_ready(double now) {
  if (ready_ || closed_) return;
  bool all = true;
  bool any = false;
  for (size_t i = 0; i < rails_.size(); ++i) {
    const bool open = open_conn(static_cast<int>(i)) != nullptr;
    all = all && open;
    any = any || open;
  }
  if (any && first_up_ms_ < 0) first_up_ms_ = now;
  // A rail that is dead from the start must not hold the job up.
  if (all || (any && now - first_up_ms_ >= 2.0 * transport_.options().heartbeat_ms)) {
    ready_ = true;
    owner_.link_ready(*this);
  }
}

void LinkEnd::unreachable(const std::string& reason) {
  if (unreachable_told_) return;
  unreachable_told_ = true;
  transport_.status().unreachable(*this, reason);
  owner_.link_unreachable(*this, reason);
}

void LinkEnd::progress() {
  for (uint64_t left = carrying_; left != 0 && !closed_; left &= left - 1) {
    if (Conn* c = open_conn(std::countr_zero(left))) c->on_event(EPOLLIN | EPOLLOUT);
  }
}

void LinkEnd::add_open(std::vector<Conn*>* out) const {
  for (Conn* c : conns_) {
    if (c != nullptr && c->is_open()) out->push_back(c);
  }
}

void LinkEnd::lend() {
  const bool asked = asked_.exchange(false, std::memory_order_relaxed);
  if (!asked && !lent_) return;
  lent_ = asked;
  for (size_t i = 0; i < conns_.size(); ++i) {
    if (Conn* c = open_conn(static_cast<int>(i))) c->lend(asked && carries(static_cast<int>(i)));
  }
}

void LinkEnd::tick(double now) {
  if (closed_) return;
  lend();
  for (size_t i = 0; i < rails_.size(); ++i) {
    const RailPort& p = port(i);
    health_.carrier(static_cast<int>(i), p.carrier, p.carrier_reason, now);
    if (per_rail_[i].addresses != p.version) addresses_changed(static_cast<int>(i), now);
    if (closed_) return;
  }
  health_.tick(now);
  settle(now);
  for (size_t i = 0; i < rails_.size() && !closed_; ++i) {
    if (open_conn(static_cast<int>(i)) != nullptr) prove(static_cast<int>(i), now);
  }
  check_ready(now);
  inquire(now);
  if (closed_) return;
  tick_more(now);
  if (closed_) return;
  check_dead(now);
}

// Operators are told early that no rail works: who is given up may end within the second, and then nobody can be asked.
void LinkEnd::check_dead(double now) {
  const bool parked = std::any_of(conns_.begin(), conns_.end(), [](const Conn* c) { return c != nullptr && c->parked_by_peer(); });
  // Parked: the peer answers, it has not heard of the epoch yet. A receiver that nobody has called yet cannot know more.
  const bool unknown = parked || (!sender_ && first_up_ms_ < 0);
  const LinkHealth::Dead dead = unknown ? LinkHealth::Dead{} : health_.dead(now);
  if (dead.why.empty()) {
    if (dead_told_) transport_.status().back(*this);
    dead_told_ = false;
  } else if (!dead_told_ && dead.ms >= (first_up_ms_ < 0 ? kDeadToldNewMs : kDeadToldMs)) {
    dead_told_ = true;
    transport_.status().dead(*this, dead.why);
  }
  const std::string reason = unknown ? "" : health_.unreachable(now);
  if (reason.empty()) {
    unreachable_told_ = false;
  } else {
    unreachable(reason);
  }
}

}  // namespace ftar
