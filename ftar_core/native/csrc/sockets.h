// Bytes through sockets, and memory for them, beside the interpreter: one call for what would be thousands, without its
// lock, so that a training thread does not feel a state being fetched or a commit being handed on.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ftar {

struct Span {
  void* data;
  size_t bytes;
};

// Fill `parts` from a blocking socket. Returns the digest over them (reduce.h), each part's the seed of the next; it is
// made of what has just arrived and is still in the cache. Throws std::system_error: the socket's own errors, ETIMEDOUT
// when nothing has come within its SO_RCVTIMEO, ECONNRESET at the end of the stream.
uint64_t receive_all(int fd, const std::vector<Span>& parts);

// The digest alone.
uint64_t digest_all(const std::vector<Span>& parts);

// The same bytes into many sockets, whether or not they block otherwise. Returns those whose kernel did not take all:
// (place in `fds`, bytes taken, or -1 for a socket that takes nothing any more).
std::vector<std::pair<size_t, int64_t>> fan_out(const std::vector<int>& fds, const void* data, size_t bytes);

// Back the whole pages inside [data, data + bytes) with memory now, contents unchanged (madvise(2), MADV_POPULATE_WRITE,
// Linux 5.14). False where the kernel does not. Large pages are left to the kernel's settings: a virtual machine whose
// free memory goes back to its host pays more for a fresh one of them than for 512 small ones that were in use lately.
bool populate(void* data, size_t bytes);

}  // namespace ftar
