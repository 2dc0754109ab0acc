// Bytes whose value depends on the stream, the message and their place in it, so that a lost, doubled, moved or late one
// shows. Word i of a message is (start + i * step): filled and compared at the speed of memory.
#pragma once
#include <cstdint>
#include <cstring>

namespace ftar::bench {

inline constexpr unsigned char kCleared = 0xEE;  // what a buffer holds that waits for a message

namespace detail {
inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
inline constexpr uint64_t kStep = 0x9e3779b97f4a7c15;

// Wrong bytes of `bytes` at `p` against words start, start + step, ...
inline uint64_t wrong_words(const unsigned char* p, size_t bytes, uint64_t start, uint64_t step) {
  uint64_t wrong = 0;
  constexpr size_t kBlock = 4096;
  for (size_t at = 0; at < bytes; at += kBlock) {
    const size_t n = bytes - at < kBlock ? bytes - at : kBlock;
    uint64_t word = start + static_cast<uint64_t>(at / 8) * step;
    uint64_t differs = 0;
    size_t i = 0;
    for (; i + 8 <= n; i += 8, word += step) {
      uint64_t found = 0;
      std::memcpy(&found, p + at + i, 8);
      differs |= found ^ word;
    }
    if (i < n) {
      uint64_t found = word;
      std::memcpy(&found, p + at + i, n - i);
      differs |= found ^ word;
    }
    if (differs == 0) continue;
    word = start + static_cast<uint64_t>(at / 8) * step;
    for (i = 0; i < n; ++i) {
      unsigned char expected[8];
      const uint64_t w = word + static_cast<uint64_t>(i / 8) * step;
      std::memcpy(expected, &w, 8);
      wrong += p[at + i] != expected[i % 8] ? 1 : 0;
    }
  }
  return wrong;
}
}  // namespace detail

inline uint64_t first_word(uint64_t stream, uint64_t message) { return detail::mixed(detail::mixed(stream) ^ message); }

inline void fill(void* to, size_t bytes, uint64_t stream, uint64_t message) {
  auto* p = static_cast<unsigned char*>(to);
  uint64_t word = first_word(stream, message);
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8, word += detail::kStep) std::memcpy(p + i, &word, 8);
  if (i < bytes) std::memcpy(p + i, &word, bytes - i);
}

inline uint64_t wrong_bytes(const void* at, size_t bytes, uint64_t stream, uint64_t message) {
  return detail::wrong_words(static_cast<const unsigned char*>(at), bytes, first_word(stream, message), detail::kStep);
}

inline uint64_t not_cleared(const void* at, size_t bytes) {
  constexpr uint64_t kWord = 0x0101010101010101ull * kCleared;
  return detail::wrong_words(static_cast<const unsigned char*>(at), bytes, kWord, 0);
}

}  // namespace ftar::bench
