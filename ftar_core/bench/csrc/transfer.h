// One measured transfer, in the caller's thread: `count` messages of one size, or as many round trips.
#pragma once
#include <cstdint>
#include <utility>

#include "channel.h"

namespace ftar::bench {

struct Span {
  int64_t begin_ns;
  int64_t end_ns;
};

// Throw std::runtime_error when nothing moves for `patience_s`. `count` messages, at most `window` of them in flight.
Span send_many(Channel& channel, size_t bytes, uint64_t count, int window, double patience_s);
Span receive_many(Channel& channel, size_t bytes, uint64_t count, int window, double patience_s);
// One at a time, there and back. `first`: this end begins.
Span ping_pong(Channel& out, Channel& into, size_t bytes, uint64_t count, bool first, double patience_s);

}  // namespace ftar::bench
