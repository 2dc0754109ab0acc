// See way.h.
#include "way.h"

#include <pthread.h>

#include <csignal>

#include "../device.h"
#include "../forks.h"
#include "../transport.h"

namespace ftar::cuda {

StreamWay::StreamWay(const Driver& driver, Context context, std::string name,
                     std::function<void(const char*, Result)> failed, std::function<void()> news)
    : driver_(driver), context_(context), name_(std::move(name)), failed_(std::move(failed)), news_(std::move(news)) {}

void StreamWay::open() {
  if (const Result r = driver_.stream_create(&stream_, kStreamNonBlocking); r != kSuccess) {
    throw DeviceError("cuStreamCreate: " + driver_.describe(r));
  }
  sigset_t all, before;  // signals belong to Python's main thread
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_.native_handle(), name_.c_str());
}

StreamWay::~StreamWay() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  more_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const EventHandle e : events_) static_cast<void>(driver_.event_destroy(e));
  if (stream_ != nullptr) static_cast<void>(driver_.stream_destroy(stream_));
}

void StreamWay::abandon() {
  if (thread_.joinable()) ftar::abandon(thread_);
}

uint64_t StreamWay::mark() {
  EventHandle event = nullptr;
  Result result = kSuccess;
  const char* call = "cuEventCreate";
  uint64_t mark = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    } else {
      result = driver_.event_create(&event, kEventBlockingSync | kEventDisableTiming);
    }
    if (result == kSuccess) {
      call = "cuEventRecord";
      result = driver_.event_record(event, stream_);
      if (result != kSuccess) {
        events_.push_back(event);
        event = nullptr;
      }
    } else {
      event = nullptr;
    }
    mark = ++marked_;
    if (result != kSuccess) failed_(call, result);
    pending_.push_back({mark, event, Transport::now_ms()});
  }
  more_.notify_one();
  return mark;
}

Result StreamWay::let_wait(Stream other, uint64_t mark) {
  const std::lock_guard lock(mutex_);  // so that the event is not used again meanwhile
  for (const Pending& p : pending_) {
    if (p.mark == mark) return p.event == nullptr ? kSuccess : driver_.stream_wait(other, p.event, 0);
  }
  return kSuccess;  // reached
}

void StreamWay::settle() {
  std::unique_lock lock(mutex_);
  came_.wait(lock, [this] { return pending_.empty(); });
}

double StreamWay::oldest_ms() const {
  const std::lock_guard lock(mutex_);
  return pending_.empty() ? -1 : pending_.front().since_ms;
}

void StreamWay::run() {
  const Current current(driver_, context_);
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [this] { return ends_ || !pending_.empty(); });
    if (pending_.empty()) return;
    const Pending p = pending_.front();
    lock.unlock();
    const Result result = p.event == nullptr ? kSuccess : driver_.event_synchronize(p.event);
    if (result != kSuccess) failed_("a copy or a kernel", result);
    lock.lock();
    pending_.pop_front();
    if (p.event != nullptr) events_.push_back(p.event);
    reached_.store(p.mark, std::memory_order_release);
    if (pending_.empty()) came_.notify_all();
    lock.unlock();
    news_();
    lock.lock();
  }
}

}  // namespace ftar::cuda
