// What a benchmark drives: one direction of one connection, through the plugin's interface or over a bare socket.
//
// Both are asked in the same way, as NCCL's progress thread asks a plugin: post, then test in a loop. So the two differ in
// what they do for a message and in nothing else.
#pragma once
#include <time.h>

#include <cstddef>
#include <cstdint>

namespace ftar::bench {

inline int64_t now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

class Channel {
 public:
  virtual ~Channel() = default;
  // The memory must stay until test says done. nullptr: not now, ask again. Throw std::runtime_error: it is broken.
  virtual void* isend(const void* data, size_t bytes) = 0;
  virtual void* irecv(void* into, size_t bytes) = 0;
  virtual bool test(void* request, size_t* bytes) = 0;
  virtual void close() = 0;
};

}  // namespace ftar::bench
