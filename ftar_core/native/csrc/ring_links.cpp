// A ring's dealings with its two links: admission, readiness, what is reported. See ring.h.
#include <algorithm>
#include <cmath>

#include "ring.h"

namespace ftar {

namespace {
constexpr double kGraceMs = 30;
}

void Ring::admit(Conn& conn) {
  const Hello& hello = conn.hello();
  if (!in_ || in_->closed()) return conn.refuse("this epoch is over here");
  const Member& previous = members_[static_cast<size_t>(wrap(me_ - 1))];
  const Member& self = members_[static_cast<size_t>(me_)];
  if (hello.from != previous.name) return conn.refuse(hello.from + " is not the neighbour before " + self.name);
  if (hello.from_incarnation != previous.incarnation) {
    return conn.refuse("incarnation " + std::to_string(hello.from_incarnation) + " of " + hello.from + " is not in this epoch");
  }
  if (hello.to_incarnation != self.incarnation) {
    return conn.refuse("incarnation " + std::to_string(hello.to_incarnation) + " of " + hello.to + " is not this process");
  }
  const int slot = in_->slot_of(hello.rail);
  if (slot < 0) return conn.refuse("there is no rail " + hello.rail);
  in_->attach(conn, slot);
}

void Ring::link_ready(LinkEnd&) {
  // A link may be ready before the other one is made.
  if (!out_ || !in_ || !out_->ready() || !in_->ready() || ready_told_ || !broken_.empty()) return;
  ready_told_ = true;
  events_.emit(event("ready"));
}

void Ring::link_rail(LinkEnd& link, const RailChange& change) {
  Event e = event("rail");
  e.peer = link.peer();
  e.rail = link.rail_name(change.rail);
  e.direction = link.sender() ? "out" : "in";
  e.state = name(change.to);
  e.reason = change.reason;
  e.active = link.carries(change.rail) && change.to == RailState::up;
  e.detect_ms = change.detect_ms;
  events_.emit(std::move(e));
}

void Ring::link_moved(LinkEnd& link, int slot, const std::string& reason) {
  const LinkRailStat stat = link.stat(slot, Transport::now_ms());
  Event e = event("rail");
  e.peer = link.peer();
  e.rail = link.rail_name(slot);
  e.direction = link.sender() ? "out" : "in";
  e.state = name(stat.verdict.state);
  e.reason = reason;
  e.active = true;
  events_.emit(std::move(e));
}

void Ring::link_unreachable(LinkEnd& link, const std::string& reason) {
  Event e = event("unreachable");
  e.peer = link.peer();
  e.reason = reason;
  events_.emit(std::move(e));
}

void Ring::link_over(LinkEnd& link, const std::string& reason, bool left_epoch) {
  if (!left_epoch && gone_told_ != link.peer()) {
    gone_told_ = link.peer();
    Event e = event("peer_gone");
    e.peer = link.peer();
    e.reason = link.peer() + " " + reason;
    events_.emit(std::move(e));
  }
  if (!left_epoch) return break_down(link.peer() + " " + reason);
  // Perhaps it left because the neighbour on our other side died, and its word was quicker than the death: whoever
  // reports a death should be the one who saw it, so the other link gets a moment to say so.
  if (break_at_ms_ < 0) {
    break_at_ms_ = Transport::now_ms() + kGraceMs;
    break_reason_ = link.peer() + " left this epoch and " + reason;
  }
}

void Ring::add_open(std::vector<Conn*>* out) const {
  if (out_) out_->add_open(out);
  if (in_) in_->add_open(out);
}

void Ring::asked() {
  if (out_) out_->asked();
  if (in_) in_->asked();
}

void Ring::take_back() {
  std::vector<Conn*> open;
  add_open(&open);
  for (Conn* c : open) c->lend(false);
}

std::vector<LinkStat> Ring::links(double now) const {
  std::vector<LinkStat> out;
  for (const LinkEnd* link : {static_cast<const LinkEnd*>(out_.get()), static_cast<const LinkEnd*>(in_.get())}) {
    if (link == nullptr) continue;
    for (int slot = 0; slot < static_cast<int>(link->rails().size()); ++slot) {
      const LinkRailStat s = link->stat(slot, now);
      LinkStat l;
      l.peer = link->peer();
      l.rail = link->rail_name(slot);
      l.direction = link->sender() ? "out" : "in";
      l.state = link->closed() ? "CLOSED" : name(s.verdict.state);
      l.active = s.active;
      l.reason = link->closed() ? broken_ : s.verdict.reason;
      l.since_s = std::max(0.0, (now - s.verdict.since_ms) / 1e3);
      l.flaps = s.verdict.flaps;
      l.resumes = link->resumes();
      l.bytes = s.bytes;
      if (s.verdict.state == RailState::hold) {
        l.hold_left_ms = static_cast<int>(std::ceil(std::max(0.0, s.verdict.hold_until_ms - now)));
      }
      out.push_back(std::move(l));
    }
  }
  return out;
}

}  // namespace ftar
