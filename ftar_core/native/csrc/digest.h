// A digest of memory, for comparing copies that should be equal: the reduced gradients of all replicas. (What is digested
// as it comes, piece by piece, uses `Digest` of reduce.h.)
//
// What it must do: any single changed bit, at every step, in a hundred megabytes that nobody wants to wait for. The bytes
// are read anyway, to see whether all gradients are finite, so `check` does both in one pass and costs little more than
// that pass, which the memory limits.
//
// How: 64 lanes of 32 bits. Of each 256 bytes, word i goes into lane i: lane = (lane ^ word) * odd, then lane ^= lane >> 15.
// Both are bijections of the lane for a given word and of the word for a given lane, so two inputs that differ in one
// aligned 8-byte word (hence in any one bit) end in different lanes, always, and the lanes are put together by bijections
// too. Several changed words are told apart but for chance: 2^-32 where all of them fall into one lane, 2^-64 otherwise.
// 64 lanes, because a vector multiplication takes ten cycles, and eight of them must be on their way at a time.
//
// It protects against accidents (a flipped bit, a torn copy), not against somebody who wants two inputs to collide.
//
// Rejected: XXH3 and its like, as fast, but a changed word reaches two lanes whose differences may cancel, once in 2^64:
// "always" is worth more here than mixing. CRC32C by the CPU's instruction: a third as fast. Sampling: a flip anywhere in
// the reduced gradients becomes part of the parameters. In the ring's thread, chunk by chunk while they are in the cache:
// the cheapest, but then what is said is what arrived, not what is in memory when the update reads it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace ftar {

struct Checked {
  uint64_t digest;
  bool finite;  // no element is infinite or NaN; integers always are
};

// What a device that goes through memory by itself needs (cuda/kernels.cu).
inline constexpr size_t kDigestLanes = 64;

// All exponent bits of an element of `width` bytes, as often as they go into 8 bytes; 0: nothing to look for.
struct Exponent {
  int width;
  uint64_t bits;
};
Exponent exponent_of(DType dtype);
uint64_t digest_of_lanes(const uint32_t* lanes, uint64_t bytes, uint64_t seed);

uint64_t quick_digest(const void* data, size_t bytes, uint64_t seed);

// `quick_digest(data, count * element_bytes(dtype), seed)` and `all_finite(data, count, dtype)`, reading memory once.
Checked check(const void* data, size_t count, DType dtype, uint64_t seed);

}  // namespace ftar
