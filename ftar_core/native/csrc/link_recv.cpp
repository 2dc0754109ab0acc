// The receiving end of a link. See link.h.
#include <algorithm>
#include <bit>

#include "link.h"

namespace ftar {

namespace {
constexpr double kStuckMs = 500;  // longer than a user takes who is about to post what makes room
constexpr uint64_t kMuchBytes = 512 * 1024;  // not acknowledged yet: what the sender keeps should stay in its caches
}  // namespace

RecvLink::RecvLink(Transport& transport, LinkOwner& owner, LinkName name, std::vector<LinkRail> rails, RecvSink& sink)
    : LinkEnd(transport, owner, std::move(name), std::move(rails), false),
      sink_(sink),
      inbox_(sink, rails_.size(), {held_by_process(), static_cast<uint64_t>(transport.options().unposted_bytes)}) {}

int RecvLink::slot_of(const std::string& rail) const {
  const auto it = std::find_if(rails_.begin(), rails_.end(), [&](const LinkRail& r) { return r.name == rail; });
  return it == rails_.end() ? -1 : static_cast<int>(it - rails_.begin());
}

void RecvLink::attach(Conn& conn, int slot) {
  const double now = Transport::now_ms();
  if (conns_[static_cast<size_t>(slot)] != nullptr) {
    drop_conn(slot);
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
  if (h.tag != tag_) return {Placement::Kind::refused, nullptr, "a frame of another link"};
  const Placement place = inbox_.begins(conn.slot(), h);
  if (place.kind == Placement::Kind::refused && !inbox_.fault().empty()) over("sent " + inbox_.fault(), false);
  return place;
}

void RecvLink::data_complete(Conn& conn, const FrameHeader&) {
  last_slot_ = conn.slot();
  inbox_.complete(conn.slot());
  deliver();
}

void RecvLink::deliver() {
  FrameHeader message;
  while (!closed_ && inbox_.next(&message)) {
    unacked_bytes_ += message.total;
    ack_soon_ = ack_soon_ || (message.flags & kAckSoon) != 0;
    sink_.received(message);
  }
}

void RecvLink::acknowledge() {
  if (acked_seq_ == inbox_.next_seq()) return;
  Conn* c = open_conn(last_slot_);
  for (int i = 0; i < static_cast<int>(rails_.size()) && c == nullptr; ++i) c = open_conn(i);
  if (c == nullptr) return;
  FrameHeader h = header(FrameType::ack);
  h.seq = acked_seq_ = inbox_.next_seq();
  unacked_bytes_ = 0;
  ack_soon_ = false;
  c->send_control(h);
  c->flush();
}

void RecvLink::batch_done(Conn&) {
  if (closed_) return;
  const bool many = inbox_.next_seq() - acked_seq_ >= Outbox::kMaxAhead / 4;
  const uint64_t much = std::min<uint64_t>(kMuchBytes, static_cast<uint64_t>(transport_.options().window_bytes) / 4);
  if (ack_soon_ || many || unacked_bytes_ > much) acknowledge();
}

void RecvLink::tick_more(double now) {
  if (!inbox_.fault().empty()) return over(inbox_.fault(), false);
  deliver();  // what was complete when its connection went
  if (closed_) return;
  acknowledge();
  if (inbox_.crowded()) make_room(now);
}

// A connection waits because this process holds too much. Others of its links may have given some of it back. If what
// the user waits for is behind that fragment, it comes by a fresh connection, on which all is sent in order.
void RecvLink::make_room(double now) {
  if (inbox_.room()) return kick_paused(true);
  if (!inbox_.stuck()) stuck_since_ms_ = -1;
  if (!inbox_.stuck() || stuck_since_ms_ < 0) {
    if (inbox_.stuck()) stuck_since_ms_ = now;
    return;
  }
  if (now - stuck_since_ms_ < kStuckMs) return;
  stuck_since_ms_ = -1;
  for (int i = 0; i < static_cast<int>(rails_.size()) && !closed_; ++i) {
    const Conn* c = open_conn(i);
    if (c == nullptr || !c->paused()) continue;
    drop_conn(i);
    health_.closed(i, "no room for what came out of order (unposted_bytes): connecting anew", now);
    settle(now);
  }
}

void RecvLink::kick_paused(bool now) {
  for (size_t i = 0; i < conns_.size() && !closed_; ++i) {
    if (Conn* c = open_conn(static_cast<int>(i)); c != nullptr && c->paused()) {
      now ? c->kick() : c->kick_later();
    }
  }
}

void RecvLink::places_changed(bool now) {
  if (closed_) return;
  if (inbox_.waits()) {
    inbox_.find_places();
    deliver();
  }
  kick_paused(now);
  if (!closed_ && ack_soon_) acknowledge();
}

void RecvLink::conn_gone(int slot) {
  carrying_ &= ~(uint64_t{1} << slot);
  inbox_.closed(slot);
}

const char* RecvLink::own_control(Conn& conn, const FrameHeader& h) {
  if (h.type == FrameType::open) return inbox_.opened(conn.slot(), h);
  if (h.type == FrameType::lost) return lost(conn, h);
  if (h.type == FrameType::carry) return carry(h);
  return "a frame that only a receiver may send";
}

// First close, then say what came: no byte of the old connection can land after this.
const char* RecvLink::lost(Conn& conn, const FrameHeader& h) {
  if (h.rail >= rails_.size()) return "a question about a rail that does not exist";
  const int rail = h.rail;
  if (inbox_.generation(rail) == h.generation && open_conn(rail) != nullptr) {
    if (rail == conn.slot()) return "a question about the connection it came on";
    const double now = Transport::now_ms();
    drop_conn(rail);
    health_.closed(rail, "the sender gave this rail up", now);
    settle(now);
    if (closed_ || !conn.is_open()) return nullptr;
  }
  FrameHeader answer = header(FrameType::have);
  inbox_.lost(rail, h, &answer);
  conn.send_control(answer);
  conn.flush();
  return nullptr;
}

const char* RecvLink::carry(const FrameHeader& h) {
  if (rails_.size() < 64 && (h.total >> rails_.size()) != 0) return "a rail that does not exist carries data";
  const uint64_t fresh = h.total & ~carrying_;
  const bool planned = (h.flags & kPlanned) != 0;
  if (ever_carried_ && !planned) ++resumes_;
  ever_carried_ = true;
  carrying_ = h.total;
  for (uint64_t left = fresh; left != 0 && !closed_; left &= left - 1) {
    owner_.link_moved(*this, std::countr_zero(left), std::popcount(h.total) > 1 ? "carries its share"
                                                         : planned                  ? "the sender returned to this rail"
                                                                                    : "the sender uses this rail");
  }
  return nullptr;
}

}  // namespace ftar
