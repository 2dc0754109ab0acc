// A queue in one block of memory that grows and is kept: nothing is allocated for a message that comes and goes.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

namespace ftar {

template <typename T>
class Fifo {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return slots_[(begin_ + i) & (slots_.size() - 1)]; }
  const T& operator[](size_t i) const { return slots_[(begin_ + i) & (slots_.size() - 1)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }

  void push_back(T value) {
    if (size_ == slots_.size()) grow();
    (*this)[size_++] = std::move(value);
  }
  T pop_front() {
    T value = std::exchange(front(), T{});
    begin_ = (begin_ + 1) & (slots_.size() - 1);
    --size_;
    return value;
  }
  void clear() {
    while (!empty()) pop_front();
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 16 : 2 * slots_.size());
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    begin_ = 0;
  }

  std::vector<T> slots_;  // a power of two
  size_t begin_ = 0;
  size_t size_ = 0;
};

}  // namespace ftar
