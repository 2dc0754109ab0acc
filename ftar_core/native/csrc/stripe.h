// Which rail takes the next piece when several carry data. Pure: loads in, a size out; no socket, no clock.
//
// Rails pull: one is asked about when it can take more. It takes a piece only if it would be through with it no later than
// the fastest other rail would be through with everything that waits, that piece included. So nothing that is handed to a
// slow rail is waited for at the end, rails get work in proportion to what they do, and the rail that would finish first
// never declines: something always moves. A piece is a few milliseconds' worth, so that a rail that is lost or slows down
// has little of anybody's message; small messages are not cut, or every one of them would wait for the slowest rail.
//
// Rejected: fixed shares by nominal speed. A rail that another job shares, or that is half broken, then holds up all others.
#pragma once
#include <cstdint>
#include <vector>

namespace ftar {

struct RailLoad {
  double rate = 0;       // bytes a millisecond, measured; 0: not yet
  uint64_t backlog = 0;  // bytes handed to it that its peer's kernel does not have yet
};

inline constexpr uint64_t kWholeBytes = 64u << 10;  // messages up to here are not cut
inline constexpr uint64_t kMaxPiece = 1u << 20;
inline constexpr double kPieceMs = 4;

// The most bytes that `rail` should take of the next `piece` (what waits of one message), when `queued` bytes wait in
// all; 0: none. An empty message counts as a byte.
uint64_t stripe_share(const std::vector<RailLoad>& rails, int rail, uint64_t queued, uint64_t piece);

// The rate of a rail: bytes by the time in which there was something to send, the last tenths of a second counting most.
class RateMeter {
 public:
  // Totals since the connection was made.
  void sample(uint64_t acknowledged_bytes, double busy_ms);
  // It had nothing to do because it seemed too slow: look again, or a rail that was slow once is slow for ever.
  void doubt() { rate_ *= 1.05; }
  double rate() const { return rate_; }

 private:
  double rate_ = 0;
  uint64_t bytes_ = 0;
  double busy_ms_ = 0;
};

}  // namespace ftar
