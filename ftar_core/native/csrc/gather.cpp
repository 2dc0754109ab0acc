// See gather.h.
#include "gather.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "bytes.h"

namespace ftar {

namespace {

constexpr int kBatch = 64;
constexpr int kMostBatches = 64;            // a flood of strangers' datagrams must not keep the beat from being sent
constexpr int kBufferBytes = 1024 * 1024;  // the kernel gives what its limit allows

int bind_to(const std::string& host, int& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.empty() ? nullptr : host.c_str(), "0", &hints, &found) != 0) {
    throw std::invalid_argument("heartbeat: no address of this machine: " + host);
  }
  int fd = -1;
  int error = 0;
  for (addrinfo* a = found; a != nullptr && fd < 0; a = a->ai_next) {
    fd = ::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    if (::bind(fd, a->ai_addr, a->ai_addrlen) != 0 ||
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
      error = errno;
      ::close(fd);
      fd = -1;
      continue;
    }
    port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  }
  ::freeaddrinfo(found);
  if (fd < 0) throw std::runtime_error("heartbeat: no socket on " + host + ": " + std::strerror(error));
  static_cast<void>(::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kBufferBytes, sizeof kBufferBytes));
  return fd;
}

}  // namespace

Gather::Gather(const std::string& host, std::string cookie, int ranks) : cookie_(std::move(cookie)) {
  if (cookie_.size() != 16) throw std::invalid_argument("heartbeat: a cookie of 16 bytes is expected");
  if (ranks < 2 || ranks > 65536) throw std::invalid_argument("heartbeat: 2 to 65536 ranks are possible");
  table_.resize(static_cast<size_t>(ranks));
  fd_ = bind_to(host, port_);
}

Gather::~Gather() { ::close(fd_); }

void Gather::drain(int64_t now_ms) {
  std::array<std::array<unsigned char, kBeatBytes + kTeamBytes + 1>, kBatch> buffers;
  std::array<iovec, kBatch> vectors;
  std::array<mmsghdr, kBatch> messages;
  for (int batch = 0; batch < kMostBatches; ++batch) {
    for (size_t i = 0; i < kBatch; ++i) {
      vectors[i] = {buffers[i].data(), buffers[i].size()};
      messages[i] = {};
      messages[i].msg_hdr.msg_iov = &vectors[i];
      messages[i].msg_hdr.msg_iovlen = 1;
    }
    const int count = ::recvmmsg(fd_, messages.data(), kBatch, MSG_DONTWAIT, nullptr);
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(i);
      take(buffers[at].data(), messages[at].msg_len, now_ms);
    }
    if (count < kBatch) return;
  }
}

void Gather::take(const unsigned char* d, size_t bytes, int64_t now_ms) {
  if (bytes != kBeatBytes || std::memcmp(d, "FTHB", 4) != 0 || d[4] != 2) return;
  if (std::memcmp(d + 8, cookie_.data(), 16) != 0) return;
  const size_t rank = get16(d + 6);
  if (rank == 0 || rank >= table_.size()) return;
  table_[rank] = {now_ms, d[5], get64(d + 32), get32(d + 40), get32(d + 44)};
}

namespace {

// Of ranks with equal counts: one in a phase with a budget of its own (a checkpoint) is what the others wait for, then
// whoever is still at its forward or backward, then those that wait in the ring, for the commit, or update.
int behind(uint8_t phase) {
  const int bare = phase & ~kOverdue;
  return bare >= 1 && bare <= 4 ? bare : 0;
}

}  // namespace

bool Gather::summary(unsigned char* out, const RankBeat& own, int64_t now_ms) const {
  const auto progress = [](const RankBeat& b) { 
    return std::tuple(b.step, b.produced, b.reduced, behind(b.phase));
  };
  size_t heard = 0, quietest = 0, least = 0, sharing = 1;
  const RankBeat* slow = &own;
  for (size_t rank = 1; rank < table_.size(); ++rank) {
    const RankBeat& beat = table_[rank];
    if (beat.heard_ms < 0) continue;
    if (heard == 0 || beat.heard_ms < table_[quietest].heard_ms) quietest = rank;
    ++heard;
    if (progress(beat) < progress(*slow)) {
      slow = &beat, least = rank, sharing = 1;
    } else if (progress(beat) == progress(*slow)) {
      ++sharing;
    }
  }
  if (heard == 0) return false;
  const int64_t silent_ms = std::clamp<int64_t>(now_ms - table_[quietest].heard_ms, 0, UINT32_MAX);
  put16(out, static_cast<uint16_t>(std::min<size_t>(heard, 65535)));
  put16(out + 2, static_cast<uint16_t>(quietest));
  put32(out + 4, static_cast<uint32_t>(silent_ms));
  put16(out + 8, static_cast<uint16_t>(least));
  put16(out + 10, static_cast<uint16_t>(std::min<size_t>(sharing, 65535)));
  out[12] = slow->phase;
  out[13] = out[14] = out[15] = 0;
  put64(out + 16, slow->step);
  put32(out + 24, slow->produced);
  put32(out + 28, slow->reduced);
  return true;
}

}  // namespace ftar
