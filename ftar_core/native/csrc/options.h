// Settings of the link layer. Times in milliseconds, sizes in bytes.
//
// Why these defaults. Heartbeats: 3 x 50 ms finds a rail that loses packets silently in 150 ms, below TCP's own 200 ms
// floor, and three are needed before one late datagram counts as nothing. Carrier: one ioctl costs about 3 us, so a
// poll every 2 ms costs 0.15 % of a core and finds a pulled cable in 2 ms. Hold-down: a second is longer than the
// bounce of a link that comes up (auto-negotiation), and doubling to a minute keeps a flapping link out of the way.
#pragma once
#include <cstdint>
#include <string>

namespace ftar {

struct Options {
  int heartbeat_ms = 50;
  int heartbeat_misses = 3;
  int carrier_poll_ms = 2;
  int hold_down_ms = 1000;
  int hold_down_max_ms = 60000;
  int probe_echoes = 5;
  int probe_interval_ms = 50;
  int unreachable_ms = 200;
  int handshake_ms = 3000;
  int chunk_bytes = 256 * 1024;
  int window_bytes = 8 * 1024 * 1024;
  int unposted_bytes = 1 << 30;  // most that this process holds of messages that came before their place, of all links
  std::string congestion = "cubic";
  std::string mode = "backup";  // one rail carries the data and the others stand by; "stripe": every rail carries its share

  // Empty when the settings can be used; otherwise one sentence that names the setting.
  std::string problem() const;
};

}  // namespace ftar
