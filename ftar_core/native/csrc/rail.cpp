// See rail.h.
#include "rail.h"

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport.h"

namespace ftar {

namespace {
constexpr size_t kReadBudget = 4u << 20;  // then the other connections get their turn
constexpr double kSynMs = 200;            // a SYN lost on a dead rail is repeated by us, not after TCP's second
ConnEnd end_of(int error) {
  if (error == ECONNREFUSED) return ConnEnd::refused;
  return error == ECONNRESET || error == EPIPE ? ConnEnd::peer : ConnEnd::here;
}
}  // namespace

Conn::Conn(Transport& transport, int fd, int rail, uint64_t id)
    : transport_(transport), fd_(fd), rail_(rail), id_(id), dialled_(false), stage_(Stage::hello), key_(transport.key()) {
  since_ms_ = transport_.now_ms();
  later(transport_.options().handshake_ms);
  challenge_.nonce = random_bytes(16);
  unsigned char message[Challenge::kSize];
  challenge_.write(message);
  out_.assign(reinterpret_cast<const char*>(message), sizeof message);
  transport_.watch(fd_, id_, mask_ = EPOLLIN, true);
  close_in_children(fd_);
  flush();
}

Conn::Conn(Transport& transport, int fd, int rail, uint64_t id, Hello hello, const std::string& key, ConnUser* user,
           int slot)
    : transport_(transport),
      fd_(fd),
      rail_(rail),
      slot_(slot),
      id_(id),
      dialled_(true),
      stage_(Stage::connecting),
      user_(user),
      key_(key),
      hello_(std::move(hello)) {
  since_ms_ = transport_.now_ms();
  later(std::max<double>(kSynMs, transport_.options().probe_interval_ms));
  hello_.nonce = random_bytes(16);
  transport_.watch(fd_, id_, mask_ = EPOLLOUT, true);
  close_in_children(fd_);
}

Conn::~Conn() {
  if (fd_ < 0) return;
  keep_in_children(fd_);
  ::close(fd_);
}

void Conn::later(double ms) { deadline_ms_ = transport_.now_ms() + ms; }

Address Conn::peer_address() const {
  Address a;
  a.length = sizeof a.storage;
  if (::getpeername(fd_, a.get(), &a.length) != 0) a.length = 0;
  return a;
}

Address Conn::local_address() const {
  Address a;
  a.length = sizeof a.storage;
  if (::getsockname(fd_, a.get(), &a.length) != 0) a.length = 0;
  return a;
}

void Conn::set_mask() {
  if (stage_ == Stage::closed) return;
  // A paused connection still has to notice that the peer is gone.
  uint32_t mask = paused_ ? EPOLLRDHUP : EPOLLIN;
  if (want_write_ || stage_ == Stage::connecting) mask |= EPOLLOUT;
  if (lent_) mask = 0;
  if (mask != mask_) transport_.watch(fd_, id_, mask_ = mask, false);
}

void Conn::close(bool polite) {
  if (stage_ == Stage::closed) return;
  if (polite && !sending_frame() && !out_.empty() && stage_ != Stage::connecting) {
    [[maybe_unused]] const ssize_t n = ::send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  if (!polite) {
    const linger reset{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  }
  stage_ = Stage::closed;
  keep_in_children(fd_);
  ::close(fd_);  // leaves the epoll set by itself
  fd_ = -1;
  transport_.retire(id_);
}

void Conn::fail(const std::string& reason, ConnEnd end) {
  if (stage_ == Stage::closed) return;
  ConnUser* user = user_;
  close(end == ConnEnd::version);  // what tells the other side must still arrive
  if (user != nullptr) user->conn_closed(*this, reason, end);
}

void Conn::on_event(uint32_t events) {
  if (stage_ == Stage::closed) return;
  if (stage_ == Stage::connecting) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return fail(socket_error(error), end_of(error));
    if ((events & EPOLLOUT) == 0) return;
    stage_ = Stage::challenge;
    later(transport_.options().handshake_ms);
    return set_mask();
  }
  if ((events & EPOLLOUT) != 0) flush();
  if (stage_ == Stage::closed) return;
  if (paused_) {
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) fail("closed by the peer", ConnEnd::peer);
    return;
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0) on_readable();
}

void Conn::on_readable() {
  size_t budget = kReadBudget;
  while (stage_ != Stage::closed && !paused_ && budget > 0) {
    if (begin_ == end_) begin_ = end_ = 0;
    if (begin_ > 0 && kStaging - end_ < kStaging / 2) {
      std::memmove(staging_, staging_ + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    iovec parts[2];
    int count = 0;
    const size_t direct = begin_ == end_ ? in_left_ : 0;
    if (direct > 0) parts[count++] = {in_place_, direct};
    parts[count++] = {staging_ + end_, kStaging - end_};
    const size_t asked = direct + kStaging - end_;
    const ssize_t n = ::readv(fd_, parts, count);
    if (n == 0) return fail("closed by the peer", ConnEnd::peer);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      const int error = errno;
      return fail(socket_error(error), end_of(error));
    }
    const size_t got = static_cast<size_t>(n);
    bytes_received_ += got;
    budget -= std::min(budget, got);
    if (user_ != nullptr) user_->conn_heard(*this);
    if (stage_ == Stage::closed) return;
    const size_t placed = std::min(direct, got);
    if (placed > 0) {
      in_place_ += placed;
      in_left_ -= placed;
      user_->data_arrived(*this, placed);
    }
    end_ += got - placed;
    while (consume()) {
    }
    if (got < asked) break;
  }
  if (stage_ == Stage::open) user_->batch_done(*this);
}

bool Conn::consume() {
  if (stage_ == Stage::closed || paused_) return false;
  return stage_ == Stage::open ? consume_frame() : consume_handshake();
}

bool Conn::consume_frame() {
  if (in_data_) {
    const size_t n = std::min(end_ - begin_, in_left_);
    if (n > 0) {
      std::memcpy(in_place_, staging_ + begin_, n);
      begin_ += n;
      in_place_ += n;
      in_left_ -= n;
      user_->data_arrived(*this, n);
    }
    if (in_left_ > 0) return false;
    in_data_ = false;
    user_->data_complete(*this, in_);
    return true;
  }
  const size_t have = end_ - begin_;
  if (have < FrameHeader::kSize) return false;
  FrameHeader header;
  if (const char* error = header.parse(staging_ + begin_)) return fail(error, ConnEnd::here), false;
  if (header.type == FrameType::data) {
    const Placement place = user_->data_begins(*this, header);
    if (stage_ == Stage::closed) return false;
    if (place.kind == Placement::Kind::refused) return fail(place.reason, ConnEnd::here), false;
    if (place.kind == Placement::Kind::later) {
      paused_ = true;
      set_mask();
      return false;
    }
    begin_ += FrameHeader::kSize;
    in_ = header;
    in_data_ = true;
    in_place_ = place.into;
    in_left_ = header.length;
    return true;
  }
  if (have < FrameHeader::kSize + header.length) return false;
  const std::string text(reinterpret_cast<const char*>(staging_) + begin_ + FrameHeader::kSize, header.length);
  begin_ += FrameHeader::kSize + header.length;
  if (const char* error = user_->control(*this, header, text)) return fail(error, ConnEnd::here), false;
  return true;
}

void Conn::kick() {
  if (stage_ != Stage::open) return;
  if (paused_) {
    paused_ = false;
    while (consume()) {
    }
    if (stage_ != Stage::open) return;
    paused_ ? user_->batch_done(*this) : on_readable();
  }
  flush();
}

void Conn::kick_later() {
  if (stage_ == Stage::open) transport_.soon(id_);
}

void Conn::lend(bool lent) {
  lent_ = lent;
  set_mask();
}

short Conn::poll_events() const {
  return static_cast<short>((paused_ ? POLLRDHUP : POLLIN) | (want_write_ ? POLLOUT : 0));
}

void Conn::send_control(FrameHeader header, std::string_view text) {
  if (stage_ != Stage::open) return;
  text = text.substr(0, kMaxControlText);
  header.length = static_cast<uint32_t>(text.size());
  unsigned char bytes[FrameHeader::kSize];
  header.write(bytes);
  out_.append(reinterpret_cast<const char*>(bytes), sizeof bytes);
  out_.append(text);
}

void Conn::flush() {
  if (stage_ == Stage::closed || stage_ == Stage::connecting) return;
  for (;;) {
    ssize_t n = 0;
    if (sending_frame()) {
      iovec parts[2] = {{header_ + header_at_, FrameHeader::kSize - header_at_},
                        {const_cast<std::byte*>(payload_), payload_left_}};
      msghdr message{};
      message.msg_iov = header_at_ < FrameHeader::kSize ? parts : parts + 1;
      message.msg_iovlen = static_cast<size_t>(parts + 2 - message.msg_iov);
      n = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } else if (!out_.empty()) {
      n = ::send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    } else {
      FrameHeader next;
      if (stage_ != Stage::open || !user_->next_frame(*this, &next, &payload_)) {
        want_write_ = false;
        break;
      }
      next.write(header_);
      header_at_ = 0;
      payload_left_ = next.length;
      continue;
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        want_write_ = true;
        break;
      }
      const int error = errno;
      return fail(socket_error(error), end_of(error));
    }
    size_t sent = static_cast<size_t>(n);
    bytes_sent_ += sent;
    if (!sending_frame()) {
      out_.erase(0, sent);
      continue;
    }
    const size_t of_header = std::min(sent, FrameHeader::kSize - header_at_);
    header_at_ += of_header;
    sent -= of_header;
    payload_ += sent;
    payload_left_ -= sent;
  }
  set_mask();
}

}  // namespace ftar
