// See digest.h. The same loop twice: plain, and with AVX2 intrinsics, since compilers do not find them by themselves.
#include "digest.h"

#include <bit>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define FTAR_AVX2
#include <immintrin.h>
#endif

namespace ftar {

namespace {

constexpr size_t kLanes = kDigestLanes;
constexpr size_t kStripe = kLanes * 4;
constexpr uint32_t kOdd32 = 0x9e3779b1u;
constexpr uint64_t kOdd1 = 0xd1342543de82ef95ull;
constexpr uint64_t kOdd2 = 0x9e6c63d0876a9a47ull;

inline uint64_t finish(uint64_t h) {
  h = (h ^ (h >> 32)) * kOdd2;
  h = (h ^ (h >> 29)) * kOdd1;
  return h ^ (h >> 32);
}

// Nonzero if an element of these 8 bytes has all exponent bits set: they are cleared of everything else, so adding the
// lowest one carries into the (cleared) sign just then.
inline uint64_t not_finite(uint64_t word, Exponent e) {
  const uint64_t sign = e.width == 8 ? 1ull << 63 : e.width == 4 ? 0x8000000080000000ull : 0x8000800080008000ull;
  return ((word & e.bits) + (sign - e.bits)) & sign;
}

using Run = bool (*)(uint32_t*, const unsigned char*, size_t, Exponent);

// Takes whole stripes into the lanes. True if an element is not finite.
bool run_plain(uint32_t* lanes, const unsigned char* p, size_t stripes, Exponent e) {
  uint64_t bad = 0;
  for (; stripes > 0; --stripes, p += kStripe) {
    uint32_t w[kLanes];
    std::memcpy(w, p, kStripe);
    for (size_t i = 0; i < kLanes; ++i) {
      const uint32_t x = (lanes[i] ^ w[i]) * kOdd32;
      lanes[i] = x ^ (x >> 15);
    }
    if (e.bits == 0) continue;
    uint64_t d[kLanes / 2];
    std::memcpy(d, p, kStripe);
    for (uint64_t word : d) bad |= not_finite(word, e);
  }
  return bad != 0;
}

#ifdef FTAR_AVX2

constexpr size_t kVectors = kStripe / 32;

template <int kWidth>  // of an element, bytes; 0: nothing to look for
__attribute__((target("avx2"))) bool run_avx2(uint32_t* lanes, const unsigned char* p, size_t stripes, uint64_t bits) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(kOdd32));
  const __m256i exponent = _mm256_set1_epi64x(static_cast<int64_t>(bits));
  __m256i bad = _mm256_setzero_si256();
  __m256i lane[kVectors];
  for (size_t i = 0; i < kVectors; ++i) lane[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes) + i);
  for (; stripes > 0; --stripes, p += kStripe) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kVectors; ++i) {
      const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
      const __m256i x = _mm256_mullo_epi32(_mm256_xor_si256(lane[i], w), odd);
      lane[i] = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
      if constexpr (kWidth != 0) {
        const __m256i masked = _mm256_and_si256(w, exponent);
        const __m256i full = kWidth == 8   ? _mm256_cmpeq_epi64(masked, exponent)
                             : kWidth == 4 ? _mm256_cmpeq_epi32(masked, exponent)
                                           : _mm256_cmpeq_epi16(masked, exponent);
        bad = _mm256_or_si256(bad, full);
      }
    }
  }
  for (size_t i = 0; i < kVectors; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes) + i, lane[i]);
  return _mm256_testz_si256(bad, bad) == 0;
}

bool run_vector(uint32_t* lanes, const unsigned char* p, size_t stripes, Exponent e) {
  if (e.bits == 0) return run_avx2<0>(lanes, p, stripes, 0);
  if (e.width == 8) return run_avx2<8>(lanes, p, stripes, e.bits);
  return e.width == 4 ? run_avx2<4>(lanes, p, stripes, e.bits) : run_avx2<2>(lanes, p, stripes, e.bits);
}

Run best() { return __builtin_cpu_supports("avx2") ? run_vector : run_plain; }

#else

Run best() { return run_plain; }

#endif

Checked over(const void* data, size_t bytes, uint64_t seed, Exponent e) {
  static const Run run = best();
  const auto* p = static_cast<const unsigned char*>(data);
  alignas(32) uint32_t lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<uint32_t>(finish(seed + i * kOdd1));
  const size_t whole = bytes / kStripe;
  bool bad = run(lanes, p, whole, e);
  if (const size_t rest = bytes % kStripe; rest > 0) {  // zeros behind it are finite
    alignas(32) unsigned char last[kStripe] = {};
    std::memcpy(last, p + whole * kStripe, rest);
    bad |= run(lanes, last, 1, e);
  }
  return {digest_of_lanes(lanes, bytes, seed), !bad};
}

}  // namespace

Exponent exponent_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return {8, 0x7ff0000000000000ull};
    case DType::f32:
      return {4, 0x7f8000007f800000ull};
    case DType::bf16:
      return {2, 0x7f807f807f807f80ull};
    case DType::f16:
      return {2, 0x7c007c007c007c00ull};
    default:
      return {4, 0};
  }
}

uint64_t digest_of_lanes(const uint32_t* lanes, uint64_t bytes, uint64_t seed) {
  uint64_t h = finish(seed ^ bytes);
  for (size_t i = 0; i < kLanes; i += 2) {
    const uint64_t pair = lanes[i] | uint64_t{lanes[i + 1]} << 32;
    h = std::rotl((h ^ pair) * kOdd1, 29) + kOdd2;
  }
  return finish(h);
}

uint64_t quick_digest(const void* data, size_t bytes, uint64_t seed) { return over(data, bytes, seed, {4, 0}).digest; }

Checked check(const void* data, size_t count, DType dtype, uint64_t seed) {
  return over(data, count * element_bytes(dtype), seed, exponent_of(dtype));
}

}  // namespace ftar
