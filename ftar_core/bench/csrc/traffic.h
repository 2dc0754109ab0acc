// Traffic of many connections in one thread, as one progress thread of NCCL has them: it goes round, posts, tests, and
// lets others run when nothing moved. Every byte is checked; how long each connection stood still is written down.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "channel.h"

namespace ftar::bench {

struct StreamState {
  uint64_t id;
  bool sender;
  uint64_t posted;
  uint64_t done;
  uint64_t bytes;
  uint64_t wrong;  // bytes that are not what the sender wrote, came behind a message, or late into a buffer given back
  int64_t last_ns;  // of the last completion
};

struct Gap {
  uint64_t stream;
  int64_t from_ns;
  int64_t to_ns;
};

class Traffic {
 public:
  Traffic();
  ~Traffic();
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

  // Before start(). Both ends name the same id, sizes and window; message m has sizes[(7 m + id) mod n] bytes.
  void add(std::shared_ptr<Channel> channel, bool sender, uint64_t id, std::vector<size_t> sizes, int window);
  void start();
  void pause(bool on) { paused_ = on; }  // senders post no more; what is in flight arrives
  void stop();                           // joins the thread; requests in flight stay open
  std::vector<StreamState> state() const;
  std::string error() const;
  std::vector<Gap> take_gaps();                             // longer than 1 ms between two completed receives
  void record(int64_t from_ns, int64_t bin_ns, size_t bins);  // received bytes by time
  std::vector<uint64_t> recorded() const;

 private:
  class Stream;
  void run();
  void received(uint64_t id, int64_t last_ns, int64_t now, size_t bytes);

  std::vector<std::unique_ptr<Stream>> streams_;
  std::atomic<bool> paused_{false};
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // of what follows
  std::string error_;
  std::vector<Gap> gaps_;
  int64_t record_from_ns_ = 0;
  int64_t bin_ns_ = 1;
  std::vector<uint64_t> bins_;
  std::thread thread_;
};

}  // namespace ftar::bench
