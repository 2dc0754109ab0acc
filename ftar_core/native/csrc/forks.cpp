// See forks.h.
#include "forks.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>

namespace ftar {

namespace {
constexpr size_t kMaxDescriptors = size_t{1} << 20;  // larger numbers stay open in children
std::array<std::atomic<uint64_t>, kMaxDescriptors / 64> owned;  // a bit a descriptor
std::atomic<size_t> words{0};                                    // of `owned` that were ever used
std::atomic<uint32_t> generation{0};

bool valid(int fd) { return fd >= 0 && static_cast<size_t>(fd) < kMaxDescriptors; }

void in_child() {
  generation.fetch_add(1);
  const size_t n = words.load();
  for (size_t w = 0; w < n; ++w) {
    const uint64_t bits = owned[w].exchange(0);
    for (int b = 0; b < 64; ++b) {
      if ((bits >> b & 1) != 0) ::close(static_cast<int>(w * 64) + b);
    }
  }
}
}  // namespace

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, in_child); });
}

void close_in_children(int fd) {
  if (!valid(fd)) return;
  const size_t w = static_cast<size_t>(fd) / 64;
  size_t known = words.load();
  while (known < w + 1 && !words.compare_exchange_weak(known, w + 1)) {
  }
  owned[w].fetch_or(uint64_t{1} << (fd % 64));
}

void keep_in_children(int fd) {
  if (valid(fd)) owned[static_cast<size_t>(fd) / 64].fetch_and(~(uint64_t{1} << (fd % 64)));
}

uint32_t fork_generation() { return generation.load(std::memory_order_relaxed); }

void abandon(std::thread& thread) {
  static_cast<void>(new std::thread(std::move(thread)));  // neither joined nor destroyed: both would end this process
}

}  // namespace ftar
