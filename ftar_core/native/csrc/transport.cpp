// See transport.h.
#include "transport.h"

#include <net/if.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "reduce.h"

namespace ftar {

namespace {
constexpr uint64_t kWakeId = 0;
constexpr uint64_t kNewsId = 1;
constexpr uint64_t kDeviceId = 2;
constexpr uint64_t kUdpId = 1u << 9;  // + rail
constexpr size_t kMaxRails = 64;
// How soon after news the addresses are read, so that a storm of news costs little; how often without netlink.
constexpr double kAddressesMs = 5;
constexpr double kAddressesShare = 20;  // reading them takes at most this part of the time, on a host with thousands
constexpr double kAddressesAgainMs = 1000;
}  // namespace

double Transport::now_ms() {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

Transport::Transport(std::string key, const Options& options, const std::vector<RailConfig>& rails)
    : key_(std::move(key)), options_(options) {
  watch_forks();
  if (rails.empty()) throw std::invalid_argument("no rail given");
  if (rails.size() > kMaxRails) throw std::invalid_argument("more than 64 rails");
  try {
    for (const RailConfig& r : rails) {
      if (r.name.empty() || r.name.size() > 63) throw std::invalid_argument("a rail's name must have 1 to 63 characters");
      for (const RailPort& p : ports_) {
        if (p.config.name == r.name) throw std::invalid_argument("two rails are called " + r.name);
      }
      RailPort port{r, parse_address(r.address, 0, r.device), {}, true, ""};
      port.device_index = ::if_nametoindex(r.device.c_str());
      if (!r.device.empty()) port.present = addresses_of(r.device, port.address.family());
      port.sockets = open_rail(port.address, r.device, r.name);
      port.address.set_port(port.sockets.port);
      for (const int fd : {port.sockets.listener, port.sockets.udp}) close_in_children(fd);
      ports_.push_back(port);
    }
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (epoll_ < 0 || wake_ < 0) throw std::system_error(errno, std::generic_category(), "epoll");
    for (const int fd : {epoll_, wake_}) close_in_children(fd);
    watch(wake_, kWakeId, EPOLLIN, true);
    if (news_.fd() >= 0) watch(news_.fd(), kNewsId, EPOLLIN, true);
    for (size_t i = 0; i < ports_.size(); ++i) {
      watch(ports_[i].sockets.listener, kListenerId + i, EPOLLIN, true);
      watch(ports_[i].sockets.udp, kUdpId + i, EPOLLIN, true);
    }
  } catch (...) {
    close_sockets();
    throw;
  }
}

Transport::~Transport() {
  if (forked()) {
    if (thread_.joinable()) abandon(thread_);
    for (auto& [id, conn] : conns_) static_cast<void>(conn.release());
    for (auto& conn : retired_) static_cast<void>(conn.release());
    return;
  }
  stop();
  close_sockets();
}

void Transport::close_sockets() {
  status_.close();
  const auto end = [](int* fd) {
    if (*fd < 0) return;
    keep_in_children(*fd);
    ::close(*fd);
    *fd = -1;
  };
  for (RailPort& p : ports_) {
    end(&p.sockets.listener);
    end(&p.sockets.udp);
  }
  end(&epoll_);
  end(&wake_);
}

void Transport::start(std::function<void(Conn&)> on_proven, std::function<double(double)> on_tick) {
  on_proven_ = std::move(on_proven);
  on_tick_ = std::move(on_tick);
  // Signals belong to Python's main thread.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_.native_handle(), "ftar-io");
}

void Transport::stop() {
  if (thread_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      wake();
    }
    thread_.join();
  }
  std::lock_guard lock(mutex_);
  status_.close();  // nobody would answer there any more
  for (auto& [id, conn] : conns_) retired_.push_back(std::move(conn));
  conns_.clear();
  retired_.clear();
}

void Transport::wake() {
  next_tick_ms_ = 0;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof one);
}

void Transport::on_device(int fd, std::function<void()> news) {
  on_device_ = std::move(news);
  watch(fd, kDeviceId, EPOLLIN, true);
}

void Transport::soon(uint64_t id) {
  soon_.push_back(id);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof one);
}

void Transport::watch(int fd, uint64_t id, uint32_t events, bool add) {
  epoll_event e{};
  e.events = events;
  e.data.u64 = id;
  if (::epoll_ctl(epoll_, add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &e) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

void Transport::run() {
  const DefaultFloatMode mode;
  epoll_event events[64];
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const double wait =
        std::clamp(std::min({next_tick_ms_, next_expire_ms_, check_addresses_ms_}) - now_ms(), 0.0, kIdleTickMs);
    lock.unlock();
    const int n = ::epoll_wait(epoll_, events, 64, static_cast<int>(std::ceil(wait)));
    lock.lock();
    for (int i = 0; i < n; ++i) dispatch(events[i].data.u64, events[i].events);
    std::vector<uint64_t> soon;
    soon.swap(soon_);
    for (const uint64_t id : soon) {
      if (auto it = conns_.find(id); it != conns_.end()) it->second->kick();
    }
    const double now = now_ms();
    if (now >= next_expire_ms_) expire(now);
    if (now >= check_addresses_ms_) check_addresses(now);
    if (now >= next_tick_ms_) {
      next_tick_ms_ = now + kIdleTickMs;  // before the call, which may wake() for an earlier one
      next_tick_ms_ = std::min(next_tick_ms_, on_tick_(now));
      paths_.tick(now);
    }
    retired_.clear();
  }
}

void Transport::dispatch(uint64_t id, uint32_t events) {
  if (id == kWakeId) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(wake_, &count, sizeof count);
  } else if (id == kNewsId) {
    if (!news_.read()) return;
    next_tick_ms_ = 0;  // the carrier, at once
    check_addresses_ms_ = std::min(check_addresses_ms_, std::max(now_ms(), addresses_free_ms_) + kAddressesMs);
  } else if (id == kDeviceId) {
    on_device_();
  } else if (id >= kListenerId && id < kListenerId + kMaxRails) {
    accept_all(static_cast<int>(id - kListenerId));
  } else if (id >= kUdpId && id < kUdpId + kMaxRails) {
    paths_.read(static_cast<int>(id - kUdpId), now_ms());
  } else if (id >= StatusSocket::kFirstId && id <= StatusSocket::kLastId) {
    status_.on_event(id);
    if (status_.busy()) next_expire_ms_ = std::min(next_expire_ms_, now_ms() + kExpireEveryMs);
  } else if (auto it = conns_.find(id); it != conns_.end()) {
    it->second->on_event(events);
  }
}

void Transport::check_addresses(double now) {
  check_addresses_ms_ = now + kAddressesAgainMs;
  if (news_.fd() >= 0) check_addresses_ms_ = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < ports_.size(); ++i) {
    RailPort& p = ports_[i];
    if (p.config.device.empty()) continue;
    try {
      std::vector<Address> present = addresses_of(p.config.device, p.address.family());
      const bool same = std::equal(present.begin(), present.end(), p.present.begin(), p.present.end(),
                                   [](const Address& a, const Address& b) { return a.same_host(b); });
      const unsigned index = ::if_nametoindex(p.config.device.c_str());
      if (!same) {
        p.present = std::move(present);
        ++p.version;
        next_tick_ms_ = 0;
      }
      const auto address = choose_address(p.address, p.present);
      if (index != 0 && address && (!address->same_host(p.address) || index != p.device_index)) move_port(i, *address, index);
    } catch (const std::exception&) {  // an address that cannot be bound yet (duplicate address detection): soon
      check_addresses_ms_ = std::min(check_addresses_ms_, now + kAddressesAgainMs / 10);
    }
  }
  const double end = now_ms();
  addresses_free_ms_ = end + kAddressesShare * (end - now);
}

// The sockets of a rail go where its address went. Connections are their owners' affair: see LinkEnd::tick.
void Transport::move_port(size_t rail, const Address& to, unsigned device_index) {
  RailPort& p = ports_[rail];
  const Sockets fresh = open_rail(to, p.config.device, p.config.name);
  for (const int fd : {fresh.listener, fresh.udp}) close_in_children(fd);
  for (const int fd : {p.sockets.listener, p.sockets.udp}) {
    keep_in_children(fd);
    ::close(fd);
  }
  p.sockets = fresh;
  p.address = to;
  p.address.set_port(fresh.port);
  p.device_index = device_index;
  ++p.version;
  next_tick_ms_ = 0;
  watch(fresh.listener, kListenerId + rail, listen_again_ms_ > 0 ? 0u : uint32_t{EPOLLIN}, true);
  watch(fresh.udp, kUdpId + rail, EPOLLIN, true);
}

void Transport::poll_carriers() {
  for (RailPort& p : ports_) p.carrier = carriers_.carrier(p.config.device, &p.carrier_reason);
}

}  // namespace ftar
