// See stripe.h.
#include "stripe.h"

#include <algorithm>

namespace ftar {

namespace {
constexpr double kFirstPiece = 256u << 10;  // from a rail that was not measured yet
constexpr double kMemoryMs = 50;
constexpr double kShortestMs = 2;
}  // namespace

uint64_t stripe_share(const std::vector<RailLoad>& rails, int rail, uint64_t queued, uint64_t piece) {
  piece = std::max<uint64_t>(piece, 1);
  const auto all = static_cast<double>(std::max(queued, piece));
  // A rail that nobody measured is taken to be like the others.
  double sum = 0;
  int measured = 0;
  for (const RailLoad& r : rails) {
    if (r.rate <= 0) continue;
    sum += r.rate;
    ++measured;
  }
  const double unknown = measured > 0 ? sum / measured : 1;
  const auto rate = [&](const RailLoad& r) { return r.rate > 0 ? r.rate : unknown; };
  const RailLoad& me = rails[static_cast<size_t>(rail)];
  double limit_ms = -1;
  for (size_t i = 0; i < rails.size(); ++i) {
    if (static_cast<int>(i) == rail) continue;
    const double through = (static_cast<double>(rails[i].backlog) + all) / rate(rails[i]);
    limit_ms = limit_ms < 0 ? through : std::min(limit_ms, through);
  }
  const double size = std::clamp(me.rate > 0 ? me.rate * kPieceMs : kFirstPiece, static_cast<double>(kWholeBytes),
                                 static_cast<double>(kMaxPiece));
  const uint64_t wanted = piece <= kWholeBytes ? piece : std::min(piece, static_cast<uint64_t>(size));
  if (limit_ms < 0) return wanted;
  const double room = rate(me) * limit_ms - static_cast<double>(me.backlog) + 0.5;  // rounding
  if (room >= static_cast<double>(wanted)) return wanted;
  const uint64_t least = std::min(wanted, kWholeBytes);
  return room >= static_cast<double>(least) ? static_cast<uint64_t>(room) : 0;
}

void RateMeter::sample(uint64_t bytes, double busy_ms) {
  if (bytes < bytes_ || busy_ms < busy_ms_) {  // a new connection
    bytes_ = 0;
    busy_ms_ = 0;
  }
  const double ms = busy_ms - busy_ms_;
  if (ms < kShortestMs) return;
  const auto moved = static_cast<double>(bytes - bytes_);
  bytes_ = bytes;
  busy_ms_ = busy_ms;
  if (rate_ <= 0 && moved <= 0) return;
  const double weight = rate_ > 0 ? ms / (ms + kMemoryMs) : 1;
  rate_ = std::max(1.0, rate_ + weight * (moved / ms - rate_));  // 0 would be "not measured"
}

}  // namespace ftar
