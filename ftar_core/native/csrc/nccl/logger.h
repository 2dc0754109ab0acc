// NCCL's logger, called without any lock of ours.
//
// It writes to a file or a pipe and may block there (a full disk, a terminal that somebody stopped). What a connection
// has to say it says under the transport's lock, which the heartbeats need too, so those lines are queued and a thread of
// their own writes them, in order. The queue is bounded: lines beyond it are counted, and the count is written instead.
#pragma once
#include <memory>
#include <string>
#include <thread>

#include "abi.h"

namespace ftar::nccl {

class Logger {
 public:
  explicit Logger(LogFunction function);
  ~Logger() { stop(); }
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  void set(LogFunction function);
  void queue(int level, std::string text);  // returns at once
  void write(int level, std::string text);  // after all that is queued; with no lock that others need
  void catch_up();  // what is queued is written when this returns, unless the logger takes long
  void stop();  // writes what is queued; gives a logger up that takes longer than a second for it

 private:
  struct State;
  std::shared_ptr<State> state_;  // also the thread's, which may be left behind in the logger
  std::thread thread_;
};

}  // namespace ftar::nccl
