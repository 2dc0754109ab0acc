// See logger.h.
#include "logger.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>

namespace ftar::nccl {

namespace {
using Clock = std::chrono::steady_clock;
constexpr size_t kMaxLines = 512;
constexpr double kLateMs = 0.5;
constexpr auto kStop = std::chrono::seconds(1);
constexpr auto kCatchUp = std::chrono::milliseconds(50);
}  // namespace

struct Logger::State {
  struct Line {
    int level;
    std::string text;
    Clock::time_point at = Clock::now();
  };
  std::atomic<LogFunction> function;
  std::mutex mutex;
  bool writing = false;  // somebody is: one at a time, so that the lines stay in order
  std::condition_variable turn;
  std::condition_variable news;
  std::condition_variable ended;
  std::deque<Line> lines;
  size_t dropped = 0;
  bool stopping = false;
  bool running = true;

  // With `mutex`.
  void say_dropped() {
    if (dropped == 0) return;
    lines.push_back({kLogWarn, std::to_string(dropped) + " lines were dropped: the logger did not take them in time"});
    dropped = 0;
  }
  // With `mutex`, which is free while the logger is called, and when nobody writes.
  void write_all(std::unique_lock<std::mutex>& lock) {
    writing = true;
    for (;;) {
      if (lines.empty()) say_dropped();
      if (lines.empty()) break;
      Line line = std::move(lines.front());
      lines.pop_front();
      lock.unlock();
      // Whoever compares lines with what else happened must not take a busy machine's delay for ours.
      const double late_ms = std::chrono::duration<double, std::milli>(Clock::now() - line.at).count();
      if (late_ms >= kLateMs) {
        char words[40];
        std::snprintf(words, sizeof words, " (%.1f ms ago)", late_ms);
        line.text += words;
      }
      if (const LogFunction f = function.load()) f(line.level, kLogNet, "libnccl-net-ftar", 0, "NET/FTAR : %s", line.text.c_str());
      lock.lock();
    }
    writing = false;
    turn.notify_all();
  }
  void run() {
    std::unique_lock lock(mutex);
    while (!stopping) {
      news.wait(lock, [&] { return stopping || !lines.empty(); });
      turn.wait(lock, [&] { return !writing; });
      write_all(lock);
    }
    running = false;
    ended.notify_all();
  }
};

Logger::Logger(LogFunction function) : state_(std::make_shared<State>()) {
  state_->function = function;
  // Signals belong to the program's threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([state = state_] { state->run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(thread_.native_handle(), "ftar-log");
}

void Logger::set(LogFunction function) { state_->function = function; }

void Logger::queue(int level, std::string text) {
  std::lock_guard lock(state_->mutex);
  if (state_->lines.size() >= kMaxLines) {
    ++state_->dropped;
    return;
  }
  state_->say_dropped();
  state_->lines.push_back({level, std::move(text)});
  state_->news.notify_one();
}

void Logger::write(int level, std::string text) {
  std::unique_lock lock(state_->mutex);
  state_->say_dropped();
  state_->lines.push_back({level, std::move(text)});  // whoever waits for it is never told "dropped"
  state_->turn.wait(lock, [&] { return !state_->writing; });
  state_->write_all(lock);
}

void Logger::catch_up() {
  std::unique_lock lock(state_->mutex);
  if (state_->turn.wait_for(lock, kCatchUp, [&] { return !state_->writing; })) state_->write_all(lock);
}

void Logger::stop() {
  if (!thread_.joinable()) return;
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->news.notify_all();
  const bool ended = state_->ended.wait_for(lock, kStop, [&] { return !state_->running; });
  lock.unlock();
  ended ? thread_.join() : thread_.detach();
}

}  // namespace ftar::nccl
