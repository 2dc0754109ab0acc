// What a rank holds: the transport, and a ring for every epoch that is active or being prepared.
//
// One lock (the transport's) covers everything, so the promise "no buffer is touched after this returns" is simply that
// the call held the lock, closed the links and forgot the operations. Events have a lock of their own: asking for them
// never waits for data.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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

  std::vector<Member::Endpoint> endpoints();
  void set_incarnation(uint64_t incarnation);
  int event_fd() const { return event_fd_; }
  std::vector<Event> events();
  void prepare(const std::string& epoch, std::vector<Member> members, int me);
  void activate(const std::string& epoch);
  void discard(const std::string& epoch);
  // The device on which memory of operations may lie; once. Throws std::invalid_argument, DeviceError.
  void use_device(std::shared_ptr<Device> device, int most_slots);
  void submit(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst, uint64_t count, DType dtype,
              bool on_device = false);
  // submit, and wait for its event, which is returned and not queued. Nothing: it did not end within timeout_ms, or a
  // signal came; the operation goes on and its event will be queued. Ignored as submit is: a failed event says so.
  std::optional<Event> reduce(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst,
                              uint64_t count, DType dtype, int timeout_ms);
  void abort();
  std::vector<LinkStat> links();
  void break_at(uint64_t step, int64_t bucket, int signal);  // see Breakpoint
  void close();

  void emit(Event event) override;

 private:
  std::unique_lock<FairMutex> locked();
  void check_open() const;  // with the lock
  bool submit_locked(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst, uint64_t count,
                     DType dtype, bool inline_send, bool on_device);
  struct Waiter {
    Waiter(const std::string& epoch, uint64_t step, uint32_t bucket);
    void wake() const;
    const std::string& epoch;
    uint64_t step;
    uint32_t bucket;
    std::thread::id thread;
    int fd;
    std::optional<Event> event;
  };
  bool done(const Waiter& waiter);
  void end_waiting(const Waiter& waiter, const std::string& reason);
  void wake_waiters();
  void carry(Waiter& waiter, double until_ms, const std::function<void()>& begin);
  void on_proven(Conn& conn);
  double on_tick(double now_ms);
  void end(const std::string& epoch, const std::string& reason);
  void remember(const std::string& epoch);

  const std::string name_;
  uint64_t incarnation_;
  int event_fd_ = -1;
  std::mutex event_mutex_;
  std::deque<Event> events_;
  std::vector<Waiter*> waiters_;  // by event_mutex_
  Waiter* carrier_ = nullptr;     // the one that moves the active ring's bytes; by the transport's lock
  Transport transport_;
  bool polls_carrier_ = false;
  std::unique_ptr<Passage> passage_;  // to the device
  std::map<std::string, std::unique_ptr<Ring>> rings_;
  std::string active_;
  std::vector<uint64_t> parked_;   // connections for epochs nobody here has heard of
  std::deque<std::string> over_;   // the last epochs that ended here: refused, not parked
  bool closed_ = false;
};

}  // namespace ftar
