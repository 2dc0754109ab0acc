// Heartbeats from a native thread: a leader's to the coordinator, another rank's to its leader (gather.h).
//
// A rank that holds Python's GIL for seconds (a large import, a C extension, a checkpoint) must not look dead, so the
// beat does not pass through Python at all: a thread of its own sends one small datagram every interval with what the
// rank last said about its progress. Lost datagrams are not sent again; the next one says more. The host name is
// resolved on that thread, again after failures, so that a coordinator that moved is found.
// Format: ftar_core/wire/heartbeat.py (little endian).
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "forks.h"
#include "gather.h"

namespace ftar {

class Heartbeat {
 public:
  // Throws std::invalid_argument for a cookie that is not 16 bytes, a port, rank or interval out of range.
  Heartbeat(std::string host, int port, std::string cookie, int rank, int interval_ms);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  void progress(int phase, uint64_t step, uint32_t produced, uint32_t reduced);
  // The present phase may last so long; after it the beats are marked (kOverdue), whatever Python is doing then.
  // Below 0: it has no budget.
  void budget(double seconds);
  void retarget(std::string host, int port, std::string cookie, int interval_ms);
  // The leader of `ranks` ranks: take in the others' beats from now on, and sum them up in mine. Returns the UDP port
  // to which they go, with this cookie. Throws as Gather.
  int gather(const std::string& host, std::string cookie, int ranks);
  void stop();  // no datagram leaves after this returns; may be called twice

 private:
  struct Target {
    std::string host;
    int port = 0;
    std::string cookie;
    int interval_ms = 0;
  };
  static void check(const Target& target);
  void run();

  const uint32_t generation_ = fork_generation();
  std::mutex mutex_;
  std::mutex join_mutex_;
  std::unique_ptr<std::condition_variable> wake_ = std::make_unique<std::condition_variable>();
  Target target_;
  uint64_t target_version_ = 0;
  uint16_t rank_;
  uint8_t phase_ = 0;
  uint64_t step_ = 0;
  uint32_t produced_ = 0;
  uint32_t reduced_ = 0;
  std::chrono::steady_clock::time_point overdue_at_ = std::chrono::steady_clock::time_point::max();
  std::unique_ptr<Gather> gather_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ftar
