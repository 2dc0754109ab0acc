// What a link's end does with its paths' heartbeats. See link.h and paths.h.
#include <algorithm>

#include "link.h"

namespace ftar {

void LinkEnd::join_path(int slot, double now) {
  const LinkRail& rail = rails_[static_cast<size_t>(slot)];
  PerRail& r = per_rail_[static_cast<size_t>(slot)];
  r.first_ping = transport_.paths().next_ping();
  r.path = transport_.paths().join(end_tag(tag_, sender_), this, slot, rail.local, rail.remote, key_, now);
}

void LinkEnd::leave_path(int slot) {
  PerRail& r = per_rail_[static_cast<size_t>(slot)];
  if (r.path != nullptr) transport_.paths().leave(r.path, end_tag(tag_, sender_));
  r.path = nullptr;
}

int LinkEnd::slot_on(int rail) const {
  const auto it = std::find_if(rails_.begin(), rails_.end(), [&](const LinkRail& r) { return r.local == rail; });
  return it == rails_.end() ? -1 : static_cast<int>(it - rails_.begin());
}

Path* LinkEnd::path_on(int rail) const {
  const int slot = slot_on(rail);
  return slot < 0 ? nullptr : per_rail_[static_cast<size_t>(slot)].path;
}

// A sender whose end of the connection outlived ours may never learn it from TCP: our reset was lost while no rail
// worked, and it has nothing left to send. Both rails silent, it would take us for stopped, and never dial again. A
// sender's end without a connection says nothing: it dials anew by itself.
bool LinkEnd::misses(int rail) const {
  const int slot = slot_on(rail);
  return !sender_ && slot >= 0 && open_conn(slot) == nullptr;
}

void LinkEnd::path_heard(int slot, uint64_t echo, double now) {
  PerRail& r = per_rail_[static_cast<size_t>(slot)];
  if (echo != 0) r.sizes.small_back(echo);
  // Small echoes are no proof where large packets were lost.
  if (echo < r.first_ping || r.proof_bytes > 0) return health_.heard(slot, now);
  health_.echo(slot, now);
  settle(now);
}

void LinkEnd::own_echo(int rail, uint64_t ping, double now) {
  const int slot = slot_on(rail);
  if (closed_ || open_conn(slot) == nullptr || ping < per_rail_[static_cast<size_t>(slot)].first_ping) return;
  per_rail_[static_cast<size_t>(slot)].sizes.large_back(ping);
  health_.echo(slot, now);
  settle(now);
}

void LinkEnd::test_size(int slot, size_t bytes, double now) {
  PerRail& r = per_rail_[static_cast<size_t>(slot)];
  if (!r.sizes.due(now)) return;
  const LinkRail& rail = rails_[static_cast<size_t>(slot)];
  const uint64_t ping = transport_.paths().next_ping();
  // One that was not even sent shows nothing.
  if (transport_.paths().send_own_ping(rail.local, rail.remote, end_tag(tag_, sender_), key_, bytes, now)) {
    r.sizes.large_sent(ping, now);
  }
}

void LinkEnd::missing_there(int slot, uint64_t ping, double asked_ms, double now) {
  const PerRail& r = per_rail_[static_cast<size_t>(slot)];
  // A connection is open here a moment before it is there: only one that had time to open can be missing.
  if (ping < r.first_ping || asked_ms - r.opened_ms < 2.0 * transport_.options().heartbeat_ms) return;
  // The sender's process lives and has no such link: its goodbye was lost.
  if (!sender_) return over("has closed this link", true);
  drop_conn(slot);
  health_.closed(slot, "the peer has closed this connection", now);
  settle(now);
}

void LinkEnd::said_goodbye(uint64_t complete, uint8_t flags) {
  if (closed_) return;
  peer_completed(complete);
  over("said goodbye", (flags & kLeftEpoch) != 0);
}

// While a rail is to be proven its echoes are waited for.
void LinkEnd::prove(int slot, double now) {
  PerRail& r = per_rail_[static_cast<size_t>(slot)];
  if (health_.rail(slot).state != RailState::probing) return;
  const double interval = transport_.options().probe_interval_ms;
  if (r.proof_bytes == 0) return r.path->hurry(interval);
  if (now < r.next_proof_ms) return;
  r.next_proof_ms = now + interval;
  const LinkRail& rail = rails_[static_cast<size_t>(slot)];
  transport_.paths().send_own_ping(rail.local, rail.remote, end_tag(tag_, sender_), key_, r.proof_bytes, now);
}

}  // namespace ftar
