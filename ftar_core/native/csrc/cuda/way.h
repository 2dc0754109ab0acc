// One stream of a GPU, and the thread that waits for what was put on it. See device.h, cuda/device.cpp.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"

namespace ftar::cuda {

// The primary context, current in this thread for as long as it lasts.
class Current {
 public:
  Current(const Driver& driver, Context context) : driver_(driver), pushed_(driver.context_push(context) == kSuccess) {}
  ~Current() {
    Context popped = nullptr;
    if (pushed_) static_cast<void>(driver_.context_pop(&popped));
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  const bool pushed_;
};

class StreamWay {
 public:
  // failed(call, result): from any thread, before a mark behind the failure is reached. news(): a mark was reached.
  StreamWay(const Driver& driver, Context context, std::string name, std::function<void(const char*, Result)> failed,
            std::function<void()> news);
  ~StreamWay();  // with the context current
  StreamWay(const StreamWay&) = delete;
  StreamWay& operator=(const StreamWay&) = delete;

  void open();     // with the context current; throws DeviceError
  void abandon();  // in a child of fork
  Stream stream() const { return stream_; }
  uint64_t mark();
  uint64_t reached() const { return reached_.load(std::memory_order_acquire); }
  Result let_wait(Stream other, uint64_t mark);  // what is put on `other` from here on begins behind it
  void settle();                                 // returns when every mark is reached
  double oldest_ms() const;                      // since when the first mark that is not reached waits; < 0: none does

 private:
  struct Pending {
    uint64_t mark;
    EventHandle event;  // nullptr: there is nothing to wait for
    double since_ms;
  };
  void run();

  const Driver& driver_;
  const Context context_;
  const std::string name_;
  const std::function<void(const char*, Result)> failed_;
  const std::function<void()> news_;
  Stream stream_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  std::condition_variable came_;
  std::deque<Pending> pending_;
  std::vector<EventHandle> events_;  // to use again
  uint64_t marked_ = 0;
  std::atomic<uint64_t> reached_{0};
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace ftar::cuda
