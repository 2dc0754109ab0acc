// What the device itself computes. kernels.ptx beside it is made from this file by compile.py, and is what is loaded: the
// driver of the machine turns it into code for its GPU. The tests compile this file for the CPU, too (tests/native/cuda).
//
// The same bits as reduce.cpp and digest.cpp, so: no fused multiply-add, no flush to zero (compile.py), 16-bit floats are
// added in fp32 and rounded to nearest even, a NaN is always the one quiet NaN.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define EACH(i, n)                                                                             \
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x; i < (n); i += step)

static __device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }

static __device__ __forceinline__ u16 to_bf16(float f) {
  const u32 u = __float_as_uint(f);
  const u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static __device__ __forceinline__ float from_f16(u16 v) {
  const u32 magnitude = (u32)(v & 0x7fffu) << 13;
  u32 bits = __float_as_uint(__uint_as_float(magnitude) * __uint_as_float(0x77800000u));
  bits |= (v & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return __uint_as_float(bits | ((u32)(v & 0x8000u) << 16));
}

static __device__ __forceinline__ u16 to_f16(float f) {
  const u32 u = __float_as_uint(f);
  const u32 sign = (u >> 16) & 0x8000u;
  const u32 a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (u16)0x7e00u;
  const u32 small = __float_as_uint(__uint_as_float(a) + 0.5f) - 0x3f000000u;
  const u32 normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  return (u16)(sign | (a >= 0x47800000u ? 0x7c00u : a < 0x38800000u ? small : normal));
}

extern "C" __global__ void ftar_add_f32(float* into, const float* what, u64 n) {
  EACH(i, n) {
    const float s = into[i] + what[i];
    into[i] = s == s ? s : __uint_as_float(0x7fc00000u);
  }
}

extern "C" __global__ void ftar_add_f64(double* into, const double* what, u64 n) {
  EACH(i, n) {
    const double s = into[i] + what[i];
    into[i] = s == s ? s : __longlong_as_double(0x7ff8000000000000ll);
  }
}

extern "C" __global__ void ftar_add_bf16(u16* into, const u16* what, u64 n) {
  EACH(i, n) into[i] = to_bf16(from_bf16(into[i]) + from_bf16(what[i]));
}

extern "C" __global__ void ftar_add_f16(u16* into, const u16* what, u64 n) {
  EACH(i, n) into[i] = to_f16(from_f16(into[i]) + from_f16(what[i]));
}

extern "C" __global__ void ftar_add_u32(u32* into, const u32* what, u64 n) {
  EACH(i, n) into[i] += what[i];
}

extern "C" __global__ void ftar_add_u64(u64* into, const u64* what, u64 n) {
  EACH(i, n) into[i] += what[i];
}

// digest.h: a lane is a thread, an area a block of 64 threads. Many words are read ahead of the chain that takes them in.
#define LANES 64
#define AHEAD 16
#define ODD32 0x9e3779b1u
#define ODD1 0xd1342543de82ef95ull
#define ODD2 0x9e6c63d0876a9a47ull

struct Area {
  u64 address;
  u64 bytes;
  u64 seed;
  u64 low;   // exponent bits in the word of an even lane; 0: nothing to look for
  u64 high;  // of an odd one
  u64 half;  // not 0: elements of 16 bits
};

static __device__ __forceinline__ u64 finish(u64 h) {
  h = (h ^ (h >> 32)) * ODD2;
  h = (h ^ (h >> 29)) * ODD1;
  return h ^ (h >> 32);
}

static __device__ __forceinline__ u32 not_finite(u32 w, u32 e, u32 half) {
  if (e == 0u) return 0u;
  if (half == 0u) return (w & e) == e ? 1u : 0u;
  const u32 low = e & 0xffffu, high = e & 0xffff0000u;
  return ((w & low) == low || (w & high) == high) ? 1u : 0u;
}

// found[area * 2 * LANES + lane] becomes the lane, and LANES behind it whether it saw what is not finite.
extern "C" __global__ void ftar_check(const Area* areas, u32* found) {
  const u32 lane = threadIdx.x;
  const Area area = areas[blockIdx.x];
  const u32 e = (u32)((lane & 1u) ? area.high : area.low), half = (u32)area.half;
  const u32* words = (const u32*)area.address + lane;
  const u64 whole = area.bytes / (4 * LANES);
  u32 x = (u32)finish(area.seed + lane * ODD1);
  u32 bad = 0;
  u64 at = 0;
  for (; at + AHEAD <= whole; at += AHEAD) {
    u32 w[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) w[k] = words[(at + k) * LANES];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      x = (x ^ w[k]) * ODD32;
      x ^= x >> 15;
      bad |= not_finite(w[k], e, half);
    }
  }
  for (; at < whole; ++at) {
    const u32 w = words[at * LANES];
    x = (x ^ w) * ODD32;
    x ^= x >> 15;
    bad |= not_finite(w, e, half);
  }
  if (area.bytes % (4 * LANES) != 0) {  // zeros behind it are finite
    const unsigned char* bytes = (const unsigned char*)area.address;
    const u64 begin = whole * (4 * LANES) + lane * 4;
    u32 w = 0;
    for (u32 k = 0; k < 4; ++k) {
      if (begin + k < area.bytes) w |= (u32)bytes[begin + k] << (8 * k);
    }
    x = (x ^ w) * ODD32;
    x ^= x >> 15;
    bad |= not_finite(w, e, half);
  }
  found[(u64)blockIdx.x * 2 * LANES + lane] = x;
  found[(u64)blockIdx.x * 2 * LANES + LANES + lane] = bad;
}
