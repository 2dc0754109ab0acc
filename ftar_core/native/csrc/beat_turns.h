// When a path sends its next heartbeat, and which of its links' ends that one asks about. Pure: no socket, no clock.
//
// One ping is for all links of a path: that it is answered shows that the path and the peer's process live. Whether the
// peer still has the connection of each link is asked in turns, as many ends a ping as fit into it. So the number of
// datagrams does not grow with the number of links. What would be late by turns is not left to them: an end that
// connects asks first, and when there is reason to doubt (the path was silent for a while, this process slept, the peer
// misses a connection) everybody asks once, one ping every kLeastGapMs until all have.
//
// Rejected: a ping of each link, paced. With 256 links and 10 ms the last one would ask after 2.5 s.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "options.h"

namespace ftar {

class BeatTurns {
 public:
  static constexpr double kLeastGapMs = 10;  // between two pings, unless heartbeats themselves are more frequent

  BeatTurns(const Options& options, size_t most_ends, double now_ms);

  void join(uint64_t end);
  void leave(uint64_t end);
  bool empty() const { return turns_.empty(); }
  void heard(double now_ms);      // the peer, on this path
  void round();                   // everybody asks once, soon
  void hurry(double interval_ms); // the next ping within this time of the last one: its echo is waited for
  // The ends that the ping that is due now asks about; empty: none is due. To be called often.
  std::vector<uint64_t> next(double now_ms);

 private:
  const double heartbeat_ms_;
  const double gap_ms_;
  const size_t most_ends_;
  std::deque<uint64_t> turns_;  // whose turn is next stands first
  size_t soon_ = 0;             // the first so many do not wait for the next heartbeat
  double heard_ms_;
  double seen_ms_;  // the last call of next()
  double sent_ms_ = -std::numeric_limits<double>::infinity();
  double interval_ms_;
};

}  // namespace ftar
