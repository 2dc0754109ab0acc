// Arithmetic on raw memory: sums, a check for non-finite values.
//
// The sum must give the same bits on every member, whatever the timing, the CPU or the caller's floating-point mode:
//   * no fused multiply-add and no reassociation (compiler flags in CMakeLists.txt);
//   * 16-bit floats are added in fp32 and rounded to nearest even after each hop;
//   * a NaN result is always the one quiet NaN, since which payload survives depends on how the compiler ordered the
//     operands of an addition;
//   * integers wrap;
//   * `DefaultFloatMode` switches flush-to-zero off for as long as we compute on a thread that is not ours.
#pragma once
#include <cfenv>
#include <cstddef>
#include <cstdint>

namespace ftar {

enum class DType : int { f32 = 0, f64 = 1, bf16 = 2, f16 = 3, i32 = 4, i64 = 5 };
inline constexpr int kDTypes = 6;

size_t element_bytes(DType dtype);

// into[i] = into[i] + add[i]; the operands may not overlap.
void sum_into(void* into, const void* add, size_t count, DType dtype);

bool all_finite(const void* data, size_t count, DType dtype);

// The sum of squares; of integers 0. A measure, not a result: how it is rounded depends on the CPU.
double squares(const void* data, size_t count, DType dtype);

// 64-bit hash of memory for comparing copies; not for strangers (digest.h). A single changed 8-byte word changes it.
uint64_t digest(const void* data, size_t bytes, uint64_t seed);

// The same of memory that comes piece by piece: every `add` but the last is a multiple of kBlock bytes.
class Digest {
 public:
  static constexpr size_t kBlock = 32;
  explicit Digest(uint64_t seed);
  void add(const void* data, size_t bytes);
  uint64_t end() const;

 private:
  uint64_t seed_;
  uint64_t bytes_ = 0;
  uint64_t lanes_[4];
  unsigned char rest_[kBlock] = {};  // of the last piece, behind its whole blocks
};

class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace ftar
