// See options.h.
#include "options.h"

namespace ftar {

namespace {
struct Range {
  const char* name;
  int value;
  int low;
  int high;
};
}  // namespace

std::string Options::problem() const {
  const Range ranges[] = {
      {"heartbeat_ms", heartbeat_ms, 1, 60000},
      {"heartbeat_misses", heartbeat_misses, 1, 100},
      {"carrier_poll_ms", carrier_poll_ms, 1, 60000},
      {"hold_down_ms", hold_down_ms, 0, 3600000},
      {"hold_down_max_ms", hold_down_max_ms, 0, 3600000},
      {"probe_echoes", probe_echoes, 1, 1000},
      {"probe_interval_ms", probe_interval_ms, 1, 60000},
      {"unreachable_ms", unreachable_ms, 1, 3600000},
      {"handshake_ms", handshake_ms, 1, 600000},
      {"chunk_bytes", chunk_bytes, 64, 64 * 1024 * 1024},
      {"window_bytes", window_bytes, 64, 1 << 30},
      {"unposted_bytes", unposted_bytes, 64, (1 << 30) - 1 + (1 << 30)},
  };
  for (const Range& r : ranges) {
    if (r.value < r.low || r.value > r.high) {
      return std::string(r.name) + " is " + std::to_string(r.value) + ", but must be between " +
             std::to_string(r.low) + " and " + std::to_string(r.high);
    }
  }
  if (hold_down_max_ms < hold_down_ms) return "hold_down_max_ms is less than hold_down_ms";
  if (window_bytes < chunk_bytes) return "window_bytes is less than chunk_bytes: no chunk would fit into the window";
  if (chunk_bytes % 8 != 0) return "chunk_bytes must be a multiple of 8, the largest element";
  if (congestion.size() > 15) return "congestion names a TCP congestion control of at most 15 characters";
  if (mode != "backup" && mode != "stripe") return "mode is '" + mode + "', but must be backup or stripe";
  return "";
}

}  // namespace ftar
