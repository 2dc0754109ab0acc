// The shell around links: one I/O thread, the rails' sockets, connections, heartbeats' datagrams, time.
//
// Everything below it (connections, links, rings) runs under one lock, either on the I/O thread or in a caller's thread:
// a caller that holds the lock knows that nobody touches a buffer. The lock is fair, since the I/O thread takes it
// again and again while data flows and an abort must not wait for a lull.
//
// Strangers: a connection that has not proved the token is closed after handshake_ms, at most kMaxStrangers of them are
// kept (the oldest goes first), and nothing is allocated for them but the connection. Connections of epochs that nobody
// here has heard of yet are parked by the user of this class, within its bounds.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "forks.h"
#include "frame.h"
#include "netio.h"
#include "options.h"
#include "paths.h"
#include "rail.h"
#include "route_news.h"
#include "status_socket.h"

namespace ftar {

class FairMutex {
 public:
  void lock() {
    next_.lock();
    data_.lock();
    next_.unlock();
  }
  bool try_lock() {
    if (!next_.try_lock()) return false;  // somebody waits: it is their turn
    const bool taken = data_.try_lock();
    next_.unlock();
    return taken;
  }
  void unlock() { data_.unlock(); }

 private:
  std::mutex next_;
  std::mutex data_;
};

struct RailConfig {
  std::string name;
  std::string device;
  std::string address;
};

struct RailPort {
  RailConfig config;
  Address address;
  Sockets sockets;
  bool carrier = true;
  std::string carrier_reason;
  // What its device has. `version` rises with every change of it; `address` and the sockets follow when the old address is
  // gone and another one has come.
  std::vector<Address> present = {};
  unsigned device_index = 0;
  unsigned version = 0;
};

class Transport {
 public:
  // Opens the rails; throws std::invalid_argument or std::system_error.
  Transport(std::string key, const Options& options, const std::vector<RailConfig>& rails);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // on_proven: an accepted connection proved the token; admit, park or refuse it.
  // on_tick: called at least at the time it returned last (and whenever something woke the thread).
  void start(std::function<void(Conn&)> on_proven, std::function<double(double now_ms)> on_tick);
  // Whoever runs the transport should know of such a stranger; at most once for every host. Set before start().
  void on_refused(std::function<void(const std::string& host, const std::string& reason)> told) { on_refused_ = std::move(told); }
  void stop();  // joins the I/O thread and closes everything; without the lock held

  FairMutex& mutex() { return mutex_; }
  bool forked() const { return fork_generation() != generation_; }  // in a child: nothing of this can be used
  static double now_ms();
  const Options& options() const { return options_; }
  const std::string& key() const { return key_; }  // what whoever dials us must know
  const std::vector<RailPort>& ports() const { return ports_; }

  // All of the following with the lock held.
  Conn* dial(int rail, const Address& to, Hello hello, const std::string& key, ConnUser* user, int slot, std::string* error);
  Conn* find(uint64_t id) const;  // nullptr: closed
  void poll_carriers();
  Paths& paths() { return paths_; }
  void wake();  // run on_tick soon
  void on_device(int fd, std::function<void()> news);  // on the I/O thread, whenever the descriptor is readable
  StatusSocket& status() { return status_; }

  // For connections.
  void watch(int fd, uint64_t id, uint32_t events, bool add);
  void retire(uint64_t id);  // keeps the object until the current events are done
  void soon(uint64_t id);    // kick() on the I/O thread
  void proven(Conn& conn);
  void refused(const Conn& conn, const std::string& reason);

 private:
  static constexpr uint64_t kListenerId = 1u << 8;  // + rail
  static constexpr double kExpireEveryMs = 20;
  static constexpr double kIdleTickMs = 1000;
  void run();
  void dispatch(uint64_t id, uint32_t events);
  void check_addresses(double now_ms);
  void move_port(size_t rail, const Address& to, unsigned device_index);  // throws
  void accept_all(int rail);
  void expire(double now_ms);
  bool drop_oldest_stranger();
  void close_sockets();

  const uint32_t generation_ = fork_generation();
  std::string key_;
  Options options_;
  std::vector<RailPort> ports_;
  CarrierReader carriers_;
  StatusSocket status_{*this};
  RouteNews news_;
  int epoll_ = -1;
  int wake_ = -1;
  FairMutex mutex_;
  std::function<void(Conn&)> on_proven_;
  std::function<double(double)> on_tick_;
  std::function<void()> on_device_;
  std::function<void(const std::string&, const std::string&)> on_refused_;
  std::unordered_set<std::string> refused_hosts_;
  std::unordered_map<uint64_t, std::unique_ptr<Conn>> conns_;
  std::vector<std::unique_ptr<Conn>> retired_;
  std::vector<uint64_t> soon_;
  Paths paths_{options_, [this](int rail) { return ports_[static_cast<size_t>(rail)].sockets.udp; }};
  uint64_t next_id_ = 1u << 16;  // smaller numbers are the sockets of rails
  double next_tick_ms_ = 0;
  double next_expire_ms_ = 0;
  double check_addresses_ms_ = 0;
  double addresses_free_ms_ = 0;
  double listen_again_ms_ = 0;  // out of file descriptors: accept again then
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ftar
