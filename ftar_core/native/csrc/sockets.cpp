// See sockets.h.
#include "sockets.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "reduce.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ftar {

namespace {

constexpr size_t kSlice = 256 * 1024;  // a multiple of Digest::kBlock that a core's own cache holds

// Until `bytes` are there.
void receive(int fd, unsigned char* to, size_t bytes) {
  while (bytes > 0) {
    const ssize_t count = ::recv(fd, to, bytes, MSG_WAITALL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const int error = errno == EAGAIN || errno == EWOULDBLOCK ? ETIMEDOUT : errno;
      throw std::system_error(error, std::generic_category(), "receiving");
    }
    if (count == 0) throw std::system_error(ECONNRESET, std::generic_category(), "closed by the other side");
    to += count;
    bytes -= static_cast<size_t>(count);
  }
}

Span whole_pages(void* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  return {reinterpret_cast<void*>(begin), end > begin ? end - begin : 0};
}

}  // namespace

uint64_t receive_all(int fd, const std::vector<Span>& parts) {
  uint64_t found = 0;
  for (const Span& part : parts) {
    Digest digest(found);
    auto* to = static_cast<unsigned char*>(part.data);
    for (size_t left = part.bytes; left > 0;) {
      const size_t count = std::min(left, kSlice);
      receive(fd, to, count);
      digest.add(to, count);
      to += count;
      left -= count;
    }
    found = digest.end();
  }
  return found;
}

uint64_t digest_all(const std::vector<Span>& parts) {
  uint64_t found = 0;
  for (const Span& part : parts) found = digest(part.data, part.bytes, found);
  return found;
}

std::vector<std::pair<size_t, int64_t>> fan_out(const std::vector<int>& fds, const void* data, size_t bytes) {
  std::vector<std::pair<size_t, int64_t>> rest;
  for (size_t i = 0; i < fds.size(); ++i) {
    ssize_t count = 0;
    do {
      count = ::send(fds[i], data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (count < 0 && errno == EINTR);
    if (count == static_cast<ssize_t>(bytes)) continue;
    const bool full = count >= 0 || errno == EAGAIN || errno == EWOULDBLOCK;
    rest.emplace_back(i, full ? std::max<int64_t>(count, 0) : -1);
  }
  return rest;
}

bool populate(void* data, size_t bytes) {
  const Span pages = whole_pages(data, bytes);
  return pages.bytes == 0 || ::madvise(pages.data, pages.bytes, MADV_POPULATE_WRITE) == 0;
}

}  // namespace ftar
