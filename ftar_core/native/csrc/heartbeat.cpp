// See heartbeat.h.
#include "heartbeat.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <stdexcept>

#include "bytes.h"

namespace ftar {

namespace {

constexpr auto kResolveAgain = std::chrono::seconds(2);

// A UDP socket for the first address of host:port; fd -1 if it cannot be resolved now.
struct Destination {
  int fd = -1;
  sockaddr_storage address{};
  socklen_t length = 0;

  void close_socket() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  void resolve(const std::string& host, int port) {
    close_socket();
    addrinfo hints{};
    hints.ai_socktype = SOCK_DGRAM;
    hints.ai_flags = AI_NUMERICSERV;
    addrinfo* found = nullptr;
    if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return;
    for (addrinfo* a = found; a != nullptr && fd < 0; a = a->ai_next) {
      fd = ::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      if (fd < 0) continue;
      std::memcpy(&address, a->ai_addr, a->ai_addrlen);
      length = a->ai_addrlen;
    }
    ::freeaddrinfo(found);
  }
};

}  // namespace

void Heartbeat::check(const Target& target) {
  if (target.host.empty()) throw std::invalid_argument("heartbeat: the host is empty");
  if (target.port < 1 || target.port > 65535) {
    throw std::invalid_argument("heartbeat: port " + std::to_string(target.port) + " is not in 1..65535");
  }
  if (target.cookie.size() != 16) {
    throw std::invalid_argument("heartbeat: the cookie has " + std::to_string(target.cookie.size()) +
                                " bytes, 16 expected");
  }
  if (target.interval_ms < 1 || target.interval_ms > 3600000) {
    throw std::invalid_argument("heartbeat: an interval of " + std::to_string(target.interval_ms) +
                                " ms is not in 1..3600000");
  }
}

Heartbeat::Heartbeat(std::string host, int port, std::string cookie, int rank, int interval_ms)
    : target_{std::move(host), port, std::move(cookie), interval_ms}, rank_(static_cast<uint16_t>(rank)) {
  watch_forks();
  check(target_);
  if (rank < 0 || rank > 65535) throw std::invalid_argument("heartbeat: the rank is not in 0..65535");
  thread_ = std::thread([this] { run(); });
}

Heartbeat::~Heartbeat() {
  if (fork_generation() == generation_) {
    stop();
  } else {
    if (thread_.joinable()) abandon(thread_);
    static_cast<void>(wake_.release());  // its end would wait for the thread to have left it
  }
}

void Heartbeat::progress(int phase, uint64_t step, uint32_t produced, uint32_t reduced) {
  if (phase < 0 || phase > 255) throw std::invalid_argument("heartbeat: the phase is not in 0..255");
  std::lock_guard lock(mutex_);
  phase_ = static_cast<uint8_t>(phase);
  step_ = step;
  produced_ = produced;
  reduced_ = reduced;
}

void Heartbeat::budget(double seconds) {
  constexpr double kLongest = 1e9;
  std::lock_guard lock(mutex_);
  overdue_at_ = seconds < 0 || seconds > kLongest
                    ? std::chrono::steady_clock::time_point::max()
                    : std::chrono::steady_clock::now() +
                          std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void Heartbeat::retarget(std::string host, int port, std::string cookie, int interval_ms) {
  Target next{std::move(host), port, std::move(cookie), interval_ms};
  check(next);
  std::lock_guard lock(mutex_);
  target_ = std::move(next);
  ++target_version_;
  wake_->notify_all();
}

int Heartbeat::gather(const std::string& host, std::string cookie, int ranks) {
  auto made = std::make_unique<Gather>(host, std::move(cookie), ranks);
  std::lock_guard lock(mutex_);
  gather_ = std::move(made);
  return gather_->port();
}

void Heartbeat::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_->notify_all();
  }
  std::lock_guard joining(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void Heartbeat::run() {
  Destination to;
  uint64_t seq = 0;
  uint64_t version = ~uint64_t{0};
  Target target;
  auto resolved = std::chrono::steady_clock::time_point{};
  bool failing = false;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto now = std::chrono::steady_clock::now();
    if (version != target_version_ || (failing && now - resolved > kResolveAgain)) {
      version = target_version_;
      target = target_;
      lock.unlock();  // resolving a name may take seconds
      to.resolve(target.host, target.port);
      lock.lock();
      resolved = now;
      failing = to.fd < 0;
      if (version != target_version_ || stopping_) continue;
    }
    unsigned char d[kBeatBytes + kTeamBytes];
    size_t bytes = kBeatBytes;
    std::memcpy(d, "FTHB", 4);
    d[4] = 2;
    const auto phase = static_cast<uint8_t>(phase_ | (now >= overdue_at_ ? kOverdue : 0));
    d[5] = phase;
    put16(d + 6, rank_);
    std::memcpy(d + 8, target.cookie.data(), 16);
    put64(d + 24, ++seq);
    put64(d + 32, step_);
    put32(d + 40, produced_);
    put32(d + 44, reduced_);
    if (gather_) {
      const int64_t now_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
      gather_->drain(now_ms);
      if (gather_->summary(d + kBeatBytes, {now_ms, phase, step_, produced_, reduced_}, now_ms)) bytes += kTeamBytes;
    }
    if (to.fd >= 0) {
      const ssize_t n = ::sendto(to.fd, d, bytes, MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&to.address), to.length);
      failing = n < 0;
    }
    wake_->wait_until(lock, now + std::chrono::milliseconds(target.interval_ms),
                     [&] { return stopping_ || version != target_version_; });
  }
  to.close_socket();
}

}  // namespace ftar
