// A link's addresses: what happens to connections when one changes, and how the peer hears of it. See link.h.
#include <algorithm>
#include <stdexcept>

#include "link.h"

namespace ftar {

std::string LinkEnd::mtu_difference(int slot) const {
  const Conn* c = open_conn(slot);
  const auto i = static_cast<size_t>(slot);
  return c == nullptr ? "" : ::ftar::mtu_difference(c->fd(), port(i).config.device, rails_[i].remote);
}

void LinkEnd::addresses_changed(int slot, double now) {
  const auto i = static_cast<size_t>(slot);
  const RailPort& p = port(i);
  per_rail_[i].addresses = p.version;
  if (Conn* c = conns_[i]; c != nullptr) {
    const Address from = c->local_address();
    const bool there = std::any_of(p.present.begin(), p.present.end(), [&](const Address& a) { return a.same_host(from); });
    if (!there && from.length > 0) {
      const std::string reason = p.config.device + " has the address " + from.host() + " no more";
      const bool was_open = c->is_open();
      drop_conn(slot);
      was_open ? health_.closed(slot, reason, now) : health_.connect_failed(slot, reason, now);
      settle(now);
    }
  }
  for (size_t k = 0; k < conns_.size() && !sender_ && !closed_; ++k) {
    if (Conn* c = open_conn(static_cast<int>(k))) {
      tell_endpoints(*c);
      c->flush();
    }
  }
}

void LinkEnd::tell_endpoints(Conn& conn) {
  for (size_t i = 0; i < rails_.size(); ++i) {
    const RailPort& p = port(i);
    if (p.version == 0) continue;  // the peer knows this one from whoever brought us together
    FrameHeader h = header(FrameType::endpoint);
    h.rail = static_cast<uint16_t>(i);
    h.seq = static_cast<uint64_t>(p.address.port());
    conn.send_control(h, p.address.host());
  }
}

const char* LinkEnd::endpoint(const FrameHeader& h, const std::string& host) {
  if (!sender_) return "a frame that only a sender may get";
  if (h.rail >= rails_.size()) return "an endpoint of a rail that does not exist";
  if (h.seq < 1 || h.seq > 65535) return "an endpoint with an impossible port";
  LinkRail& rail = rails_[h.rail];
  try {
    const Address to = parse_address(host, static_cast<int>(h.seq), port(h.rail).config.device);
    if (to.family() != rail.remote.family()) return "an endpoint of another family";
    rail.remote = to;
  } catch (const std::invalid_argument&) {
    return "an endpoint without an address";
  }
  if (per_rail_[h.rail].path != nullptr) {
    leave_path(h.rail);
    join_path(h.rail, Transport::now_ms());
  }
  return nullptr;
}

}  // namespace ftar
