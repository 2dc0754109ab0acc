// A caller that waits for one all-reduce carries its bytes. See engine.h.
//
// What a ring brings passes through two threads otherwise, the I/O thread and the one that waits for the news; at small
// sizes the second wake-up is most of an all-reduce. So the waiting thread takes the active ring's connections over for
// the time of its wait: it polls them itself, and the I/O thread keeps the heartbeats, the carriers and the clock. One
// thread carries at a time; others that wait meanwhile are told the end.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>

#include "engine.h"

namespace ftar {

namespace {
constexpr double kLookAgainMs = 50;  // connections may have come meanwhile
}

Engine::Waiter::Waiter(const std::string& of_epoch, uint64_t of_step, uint32_t of_bucket)
    : epoch(of_epoch), step(of_step), bucket(of_bucket), thread(std::this_thread::get_id()) {
  // One descriptor a thread, not one an operation.
  thread_local struct Wake {
    int fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    ~Wake() {
      if (fd >= 0) ::close(fd);
    }
  } own;
  if (own.fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  fd = own.fd;
}

void Engine::Waiter::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(fd, &one, sizeof one);
}

bool Engine::done(const Waiter& waiter) {
  std::lock_guard lock(event_mutex_);
  return waiter.event.has_value();
}

void Engine::end_waiting(const Waiter& waiter, const std::string& reason) {
  Event e;
  e.type = "failed";
  e.epoch = waiter.epoch;
  e.step = waiter.step;
  e.bucket = waiter.bucket;
  e.reason = reason;
  emit(std::move(e));
}

void Engine::wake_waiters() {
  std::lock_guard lock(event_mutex_);
  for (const Waiter* w : waiters_) w->wake();
}

std::optional<Event> Engine::reduce(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst,
                                    uint64_t count, DType dtype, int timeout_ms) {
  const double until = Transport::now_ms() + timeout_ms;
  Waiter waiter(epoch, step, bucket);
  {
    std::lock_guard lock(event_mutex_);
    waiters_.push_back(&waiter);
  }
  const auto forget = [&] {
    std::lock_guard lock(event_mutex_);
    std::erase(waiters_, &waiter);
  };
  try {
    carry(waiter, until, [&] {
      if (!submit_locked(epoch, step, bucket, src, dst, count, dtype, true, false)) {
        end_waiting(waiter, "this epoch is not the active one");
      }
    });
  } catch (...) {
    forget();
    throw;
  }
  forget();
  return std::move(waiter.event);
}

void Engine::carry(Waiter& waiter, double until, const std::function<void()>& begin) {
  std::vector<Conn*> open;
  std::vector<uint64_t> lent, ids;
  std::vector<pollfd> polled;
  std::unique_lock lock = locked();
  const bool carries = carrier_ == nullptr;
  if (carries) carrier_ = &waiter;
  const auto give_back = [&] {
    if (carries) carrier_ = nullptr;
    // Who waited once does so again: with nothing in the works, what comes meanwhile can wait for him. The I/O thread
    // would wake for it, and the two would be in each other's way.
    if (auto it = rings_.find(active_); carries && it != rings_.end() && it->second->idle()) return it->second->asked();
    for (const uint64_t id : lent) {
      if (Conn* c = transport_.find(id)) c->lend(false);
    }
  };
  try {
    begin();
    while (!done(waiter)) {
      if (closed_ || active_ != waiter.epoch) {
        end_waiting(waiter, closed_ ? "the engine was closed" : "the epoch was left");
        break;
      }
      const double left = until - Transport::now_ms();
      if (left <= 0) break;
      open.clear();
      polled.clear();
      ids.clear();
      if (auto it = rings_.find(active_); carries && it != rings_.end()) it->second->add_open(&open);
      for (Conn* c : open) {
        if (std::find(lent.begin(), lent.end(), c->id()) == lent.end()) lent.push_back(c->id());
        c->lend(true);
        ids.push_back(c->id());
        polled.push_back({c->fd(), c->poll_events(), 0});
      }
      polled.push_back({waiter.fd, POLLIN, 0});
      lock.unlock();
      const int n = ::poll(polled.data(), polled.size(), static_cast<int>(std::ceil(std::min(left, kLookAgainMs))));
      const bool interrupted = n < 0 && errno == EINTR;
      if (n > 0 && polled.back().revents != 0) {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t r = ::read(waiter.fd, &count, sizeof count);
      }
      lock.lock();
      if (interrupted) break;  // the caller's signal handlers want to run
      const DefaultFloatMode mode;
      for (size_t i = 0; n > 0 && i < ids.size(); ++i) {
        if (polled[i].revents == 0) continue;
        // poll's bits are epoll's.
        if (Conn* c = transport_.find(ids[i])) c->on_event(static_cast<uint32_t>(polled[i].revents));
      }
    }
  } catch (...) {
    give_back();
    throw;
  }
  give_back();
}

}  // namespace ftar
