// See reduce.h. Plain loops that the compiler turns into vector code, with a second version for AVX2 machines.
#include "reduce.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FTAR_VECTOR __attribute__((target_clones("avx2", "default")))
#else
#define FTAR_VECTOR
#endif

namespace ftar {

namespace {

inline float from_bf16(uint16_t v) { return std::bit_cast<float>(uint32_t{v} << 16); }

inline uint16_t to_bf16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline float from_f16(uint16_t v) {
  // The 15 bits are put where a float has them; multiplying by 2^112 corrects the exponent, for subnormals too.
  const uint32_t magnitude = uint32_t{v & 0x7fffu} << 13;
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * std::bit_cast<float>(0x77800000u));
  bits |= (v & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(bits | (uint32_t{v & 0x8000u} << 16));
}

inline uint16_t to_f16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7e00u;
  // Below 2^-14 the result is subnormal: 0.5 has the wanted last place, so the addition does the rounding.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const uint32_t large = 0x7c00u;
  return static_cast<uint16_t>(sign | (a >= 0x47800000u ? large : a < 0x38800000u ? small : normal));
}

FTAR_VECTOR void sum_f32(float* __restrict into, const float* __restrict add, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float s = into[i] + add[i];
    into[i] = s == s ? s : std::numeric_limits<float>::quiet_NaN();
  }
}

FTAR_VECTOR void sum_f64(double* __restrict into, const double* __restrict add, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const double s = into[i] + add[i];
    into[i] = s == s ? s : std::numeric_limits<double>::quiet_NaN();
  }
}

FTAR_VECTOR void sum_bf16(uint16_t* __restrict into, const uint16_t* __restrict add, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] = to_bf16(from_bf16(into[i]) + from_bf16(add[i]));
}

FTAR_VECTOR void sum_f16(uint16_t* __restrict into, const uint16_t* __restrict add, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] = to_f16(from_f16(into[i]) + from_f16(add[i]));
}

FTAR_VECTOR void sum_u32(uint32_t* __restrict into, const uint32_t* __restrict add, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] += add[i];
}

FTAR_VECTOR void sum_u64(uint64_t* __restrict into, const uint64_t* __restrict add, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] += add[i];
}

// True when no element has all exponent bits set. Blocks, so that a NaN at the start of a large buffer ends it soon.
template <typename T>
inline bool finite_bits(const T* v, size_t n, T exponent) {
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t end = begin + kBlock < n ? begin + kBlock : n;
    unsigned bad = 0;
    for (size_t i = begin; i < end; ++i) bad |= (v[i] & exponent) == exponent ? 1u : 0u;
    if (bad != 0) return false;
  }
  return true;
}

FTAR_VECTOR bool finite16(const uint16_t* v, size_t n, uint16_t e) { return finite_bits(v, n, e); }
FTAR_VECTOR bool finite32(const uint32_t* v, size_t n, uint32_t e) { return finite_bits(v, n, e); }
FTAR_VECTOR bool finite64(const uint64_t* v, size_t n, uint64_t e) { return finite_bits(v, n, e); }

FTAR_VECTOR double squares32(const float* v, size_t n) {
  double total = 0;
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    float lanes[16] = {};
    const size_t end = begin + kBlock < n ? begin + kBlock : n;
    size_t i = begin;
    for (; i + 16 <= end; i += 16) {
      for (size_t k = 0; k < 16; ++k) lanes[k] += v[i + k] * v[i + k];
    }
    for (; i < end; ++i) lanes[0] += v[i] * v[i];
    for (float lane : lanes) total += static_cast<double>(lane);
  }
  return total;
}

template <typename T, typename F>
double squares_of(const T* v, size_t n, F value) {
  double total = 0;
  for (size_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(value(v[i]));
    total += x * x;
  }
  return total;
}

constexpr uint64_t kOdd1 = 0xd1342543de82ef95ull;
constexpr uint64_t kOdd2 = 0x9e6c63d0876a9a47ull;

// Bijective in the lane and in the word: two inputs that differ in one word end in different lanes.
inline uint64_t mix(uint64_t lane, uint64_t word) { return std::rotl((lane ^ word) * kOdd1, 29) + kOdd2; }

inline uint64_t finish(uint64_t h) {
  h = (h ^ (h >> 32)) * kOdd2;
  h = (h ^ (h >> 29)) * kOdd1;
  return h ^ (h >> 32);
}

}  // namespace

size_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::bf16:
    case DType::f16:
      return 2;
    default:
      return 4;
  }
}

void sum_into(void* into, const void* add, size_t count, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return sum_f32(static_cast<float*>(into), static_cast<const float*>(add), count);
    case DType::f64:
      return sum_f64(static_cast<double*>(into), static_cast<const double*>(add), count);
    case DType::bf16:
      return sum_bf16(static_cast<uint16_t*>(into), static_cast<const uint16_t*>(add), count);
    case DType::f16:
      return sum_f16(static_cast<uint16_t*>(into), static_cast<const uint16_t*>(add), count);
    case DType::i32:
      return sum_u32(static_cast<uint32_t*>(into), static_cast<const uint32_t*>(add), count);
    case DType::i64:
      return sum_u64(static_cast<uint64_t*>(into), static_cast<const uint64_t*>(add), count);
  }
}

bool all_finite(const void* data, size_t count, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return finite32(static_cast<const uint32_t*>(data), count, 0x7f800000u);
    case DType::f64:
      return finite64(static_cast<const uint64_t*>(data), count, 0x7ff0000000000000ull);
    case DType::bf16:
      return finite16(static_cast<const uint16_t*>(data), count, 0x7f80u);
    case DType::f16:
      return finite16(static_cast<const uint16_t*>(data), count, 0x7c00u);
    default:
      return true;
  }
}

Digest::Digest(uint64_t seed) : seed_(seed), lanes_{seed ^ kOdd1, seed + kOdd2, seed ^ ~kOdd2, seed + ~kOdd1} {}

void Digest::add(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t lanes[4] = {lanes_[0], lanes_[1], lanes_[2], lanes_[3]};
  size_t left = bytes;
  for (; left >= kBlock; left -= kBlock, p += kBlock) {
    uint64_t w[4];
    std::memcpy(w, p, kBlock);
    for (int i = 0; i < 4; ++i) lanes[i] = mix(lanes[i], w[i]);
  }
  std::copy(lanes, lanes + 4, lanes_);
  std::memcpy(rest_, p, left);
  bytes_ += bytes;
}

uint64_t Digest::end() const {
  uint64_t h = finish(seed_ + bytes_);
  for (uint64_t lane : lanes_) h = mix(h, finish(lane));
  const unsigned char* p = rest_;
  for (size_t left = bytes_ % kBlock; left > 0;) {
    const size_t n = left < 8 ? left : 8;
    uint64_t w = 0;
    std::memcpy(&w, p, n);
    h = mix(h, w);
    left -= n;
    p += n;
  }
  return finish(h);
}

uint64_t digest(const void* data, size_t bytes, uint64_t seed) {
  Digest whole(seed);
  whole.add(data, bytes);
  return whole.end();
}

double squares(const void* data, size_t count, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return squares32(static_cast<const float*>(data), count);
    case DType::f64:
      return squares_of(static_cast<const double*>(data), count, [](double v) { return v; });
    case DType::bf16:
      return squares_of(static_cast<const uint16_t*>(data), count, from_bf16);
    case DType::f16:
      return squares_of(static_cast<const uint16_t*>(data), count, from_f16);
    default:
      return 0;
  }
}

}  // namespace ftar
