// See beat_turns.h.
#include "beat_turns.h"

#include <algorithm>

namespace ftar {

BeatTurns::BeatTurns(const Options& options, size_t most_ends, double now)
    : heartbeat_ms_(options.heartbeat_ms),
      gap_ms_(std::min(kLeastGapMs, heartbeat_ms_)),
      most_ends_(most_ends),
      heard_ms_(now),
      seen_ms_(now),
      interval_ms_(heartbeat_ms_) {}

void BeatTurns::join(uint64_t end) {
  turns_.push_front(end);
  ++soon_;
}

void BeatTurns::leave(uint64_t end) {
  const auto it = std::find(turns_.begin(), turns_.end(), end);
  if (it == turns_.end()) return;
  if (static_cast<size_t>(it - turns_.begin()) < soon_) --soon_;
  turns_.erase(it);
}

void BeatTurns::heard(double now) {
  if (now - heard_ms_ >= 1.5 * heartbeat_ms_) round();
  heard_ms_ = now;
}

void BeatTurns::round() { soon_ = turns_.size(); }

void BeatTurns::hurry(double interval) { interval_ms_ = std::min(interval_ms_, std::max(gap_ms_, interval)); }

std::vector<uint64_t> BeatTurns::next(double now) {
  if (now - seen_ms_ >= 2 * heartbeat_ms_) round();
  seen_ms_ = now;
  std::vector<uint64_t> ends;
  if (turns_.empty() || now - sent_ms_ < (soon_ > 0 ? gap_ms_ : interval_ms_)) return ends;
  sent_ms_ = now;
  interval_ms_ = heartbeat_ms_;
  const size_t n = std::min(turns_.size(), most_ends_);
  ends.assign(turns_.begin(), turns_.begin() + static_cast<std::ptrdiff_t>(n));
  turns_.erase(turns_.begin(), turns_.begin() + static_cast<std::ptrdiff_t>(n));
  turns_.insert(turns_.end(), ends.begin(), ends.end());
  soon_ -= std::min(soon_, n);
  return ends;
}

}  // namespace ftar
