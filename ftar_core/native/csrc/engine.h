// What a rank holds: the transport, and a ring for every epoch that is active or being prepared.
//
// One lock (the transport's) covers everything, so the promise "no buffer is touched after this returns" is simply that
// the call held the lock, closed the links and forgot the operations. Events have a lock of their own: asking for them
// never waits for data.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring.h"
#include "transport.h"

namespace ftar {

class Engine final : public EventSink {
 public:
  // Throws std::invalid_argument (settings, rails) or std::system_error (sockets).
  Engine(const std::string& job, const std::string& token, std::string name, uint64_t incarnation,
         const std::vector<RailConfig>& rails, const Options& options);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::vector<Member::Endpoint> endpoints() const;
  void set_incarnation(uint64_t incarnation);
  int event_fd() const { return event_fd_; }
  std::vector<Event> events();
  void prepare(const std::string& epoch, std::vector<Member> members, int me);
  void activate(const std::string& epoch);
  void discard(const std::string& epoch);
  void submit(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst, uint64_t count, DType dtype);
  void abort();
  std::vector<LinkStat> links();
  void close();

  void emit(Event event) override;

 private:
  std::unique_lock<FairMutex> locked();
  void check_open() const;  // with the lock
  void on_proven(Conn& conn);
  double on_tick(double now_ms);
  void end(const std::string& epoch, const std::string& reason);
  void remember(const std::string& epoch);

  const std::string name_;
  uint64_t incarnation_;
  int event_fd_ = -1;
  std::mutex event_mutex_;
  std::deque<Event> events_;
  Transport transport_;
  bool polls_carrier_ = false;
  std::map<std::string, std::unique_ptr<Ring>> rings_;
  std::string active_;
  std::vector<uint64_t> parked_;   // connections for epochs nobody here has heard of
  std::deque<std::string> over_;   // the last epochs that ended here: refused, not parked
  bool closed_ = false;
};

}  // namespace ftar
