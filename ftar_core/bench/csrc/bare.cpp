// See bare.h.
#include "bare.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ftar::bench {

namespace {
constexpr int kPatienceMs = 60000;

void prepare(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw std::runtime_error(std::string("a socket: ") + std::strerror(errno));
  }
}

// Bytes moved; 0 if the socket is not ready.
size_t moved(ssize_t n, bool receiving) {
  if (n > 0) return static_cast<size_t>(n);
  if (n == 0 && receiving) throw std::runtime_error("the peer of a bare socket has closed it");
  if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    throw std::runtime_error(std::string("a bare socket: ") + std::strerror(errno));
  }
  return 0;
}
}  // namespace

SocketChannel::SocketChannel(int fd) : fd_(fd) { prepare(fd); }

SocketChannel::~SocketChannel() { close(); }

void SocketChannel::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void* SocketChannel::post(char* data, size_t bytes, bool sending) {
  if (posted_ - taken_ >= kSlots) return nullptr;
  Slot& slot = slots_[posted_++ % kSlots];
  slot = {data, bytes, sending ? bytes : 0, 0, sending, false};
  return &slot;
}

void* SocketChannel::isend(const void* data, size_t bytes) {
  void* request = post(const_cast<char*>(static_cast<const char*>(data)), bytes, true);
  if (request != nullptr) progress();
  return request;
}

void* SocketChannel::irecv(void* into, size_t bytes) { return post(static_cast<char*>(into), bytes, false); }

bool SocketChannel::test(void* request, size_t* bytes) {
  auto& slot = *static_cast<Slot*>(request);
  if (!slot.done) progress();
  if (!slot.done) return false;
  *bytes = slot.bytes;
  ++taken_;
  return true;
}

void SocketChannel::progress() {
  while (moved_ < posted_) {
    Slot& slot = slots_[moved_ % kSlots];
    constexpr size_t kHeader = sizeof slot.header;
    iovec parts[2];
    int count = 0;
    if (slot.at < kHeader) parts[count++] = {reinterpret_cast<char*>(&slot.header) + slot.at, kHeader - slot.at};
    const size_t payload_at = slot.at < kHeader ? 0 : slot.at - kHeader;
    if (payload_at < slot.bytes) parts[count++] = {slot.data + payload_at, slot.bytes - payload_at};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    const size_t n = slot.sending ? moved(::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT), false)
                                  : moved(::recvmsg(fd_, &message, MSG_DONTWAIT), true);
    if (n == 0) return;
    slot.at += n;
    if (!slot.sending && slot.at >= kHeader && slot.header != slot.bytes) {
      throw std::runtime_error("a bare socket: a message of another size than its receive");
    }
    if (slot.at < kHeader + slot.bytes) continue;
    slot.done = true;
    ++moved_;
  }
}

Ring::Ring(int out, int into, int ranks) : out_(out), into_(into), ranks_(ranks) {
  if (ranks < 2) throw std::runtime_error("a ring has at least 2 ranks");
  prepare(out);
  prepare(into);
}

void Ring::run(const void* send, void* receive, size_t bytes) {
  const size_t segment = std::max<size_t>(1, bytes / static_cast<size_t>(ranks_));
  for (int round = 0; round < 2 * (ranks_ - 1); ++round) {
    exchange(static_cast<const char*>(send), static_cast<char*>(receive), segment);
  }
}

void Ring::exchange(const char* send, char* receive, size_t bytes) {
  size_t to_send = bytes;
  size_t to_receive = bytes;
  while (to_send > 0 || to_receive > 0) {
    size_t n = 0;
    if (to_send > 0) {
      n = moved(::send(out_, send + (bytes - to_send), to_send, MSG_NOSIGNAL | MSG_DONTWAIT), false);
      to_send -= n;
    }
    if (to_receive > 0) {
      const size_t got = moved(::recv(into_, receive + (bytes - to_receive), to_receive, MSG_DONTWAIT), true);
      to_receive -= got;
      n += got;
    }
    if (n > 0) continue;
    pollfd wanted[2] = {{out_, POLLOUT, 0}, {into_, POLLIN, 0}};
    const int first = to_send > 0 ? 0 : 1;
    const int last = to_receive > 0 ? 2 : 1;
    const int ready = ::poll(wanted + first, static_cast<nfds_t>(last - first), kPatienceMs);
    if (ready == 0) throw std::runtime_error("the bare ring stands still");
  }
}

}  // namespace ftar::bench
