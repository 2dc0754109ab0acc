// The receiving end of a link. See link.h.
#include <algorithm>

#include "link.h"

namespace ftar {

RecvLink::RecvLink(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, RecvSink& sink)
    : LinkEnd(transport, owner, std::move(name), std::move(rails), false), sink_(sink) {}

int RecvLink::slot_of(const std::string& rail) const {
  const auto it = std::find_if(rails_.begin(), rails_.end(), [&](const LinkRail& r) { return r.name == rail; });
  return it == rails_.end() ? -1 : static_cast<int>(it - rails_.begin());
}

void RecvLink::attach(Conn& conn, int slot) {
  const double now = Transport::now_ms();
  if (conns_[static_cast<size_t>(slot)] != nullptr) {
    drop_conn(slot);
    if (active_ == slot) active_ = -1;
    health_.closed(slot, "the peer connected anew", now);
    settle(now);
  }
  if (closed_) return conn.refuse("this link is over");
  conns_[static_cast<size_t>(slot)] = &conn;
  // The peer may have a new address since the epoch was made.
  Address remote = conn.peer_address();
  if (remote.length > 0) {
    remote.set_port(conn.hello().udp_port);
    rails_[static_cast<size_t>(slot)].remote = remote;
  }
  conn.admit(this, slot);
  if (conn.is_open()) attached(conn, now);
}

Placement RecvLink::data_begins(Conn& conn, const FrameHeader& h) {
  const auto refuse = [](const char* reason) { return Placement{Placement::Kind::refused, nullptr, reason}; };
  if (h.tag != tag_) return refuse("a frame of another link");
  if (h.generation != generation_ || conn.slot() != active_) return refuse("a data frame of another generation");
  if (h.seq != next_seq_ || h.offset != got_) return refuse("a data frame out of order");
  if (h.offset != 0) {
    if (h.total != total_) return refuse("a message that changed its length");
    return {Placement::Kind::here, into_ + h.offset, nullptr};
  }
  const Placement place = sink_.place(h);
  if (place.kind == Placement::Kind::here) {
    into_ = place.into;
    total_ = h.total;
  }
  return place;
}

void RecvLink::data_complete(Conn&, const FrameHeader& h) {
  if (got_ < h.total) return;
  ++next_seq_;
  got_ = 0;
  into_ = nullptr;
  unacked_bytes_ += h.total;
  ack_soon_ = ack_soon_ || (h.flags & kAckSoon) != 0;
  sink_.received(h);
}

void RecvLink::acknowledge() {
  Conn* c = open_conn(active_);
  if (c == nullptr || acked_seq_ == next_seq_) return;
  FrameHeader h = header(FrameType::ack);
  h.seq = acked_seq_ = next_seq_;
  unacked_bytes_ = 0;
  ack_soon_ = false;
  c->send_control(h);
  c->flush();
}

void RecvLink::batch_done(Conn&) {
  if (closed_) return;
  if (ack_soon_ || unacked_bytes_ * 4 > static_cast<uint64_t>(transport_.options().window_bytes)) acknowledge();
}

void RecvLink::tick_more(double) { acknowledge(); }

void RecvLink::places_changed(bool now) {
  Conn* c = open_conn(active_);
  if (c == nullptr) return;
  now ? c->kick() : c->kick_later();
}

const char* RecvLink::own_control(Conn& conn, const FrameHeader& h) {
  if (h.type != FrameType::change) return "a frame that only a receiver may send";
  if (h.generation <= generation_) return nullptr;  // overtaken by a later change
  const bool planned = (h.flags & kPlanned) != 0;
  if (planned && got_ != 0) return "a planned change of rail in the middle of a message";
  const int old = active_;
  generation_ = h.generation;
  active_ = conn.slot();
  if (!planned && old >= 0 && old != active_ && open_conn(old) != nullptr) {
    // First close, then say what is missing: no byte of the old connection can arrive after this.
    const double now = Transport::now_ms();
    drop_conn(old);
    health_.closed(old, "the sender gave this rail up", now);
    settle(now);
    if (closed_ || !conn.is_open()) return nullptr;
  }
  if (old >= 0 && !planned) ++resumes_;
  FrameHeader answer = header(FrameType::resume);
  answer.seq = acked_seq_ = next_seq_;
  answer.offset = got_;
  unacked_bytes_ = 0;
  ack_soon_ = false;
  conn.send_control(answer);
  owner_.link_moved(*this, active_, planned ? "the sender returned to this rail" : "the sender uses this rail");
  conn.flush();
  return nullptr;
}

}  // namespace ftar
