// What a process has of this plugin, whatever the number of communicators: rails, one transport, listeners, connections.
//
// One I/O thread serves all of it (transport.h); isend and irecv also move what they can in the caller's thread, which
// saves the hop through the other. The transport's lock covers everything here. It is held for as long as it takes to
// hand bytes to a socket or to take them from one, never while anything is waited for, so no call blocks.
//
// A connection is made by the first rail that proves it: the hello names the listener (its nonce), the connection (the
// connecting process's own name and number) and, as its rail, "SLOT/P,P,...": which rail of the link this is, and which
// rails of the handle the link uses. All rails of one connection thereby meet, however many connections one handle makes,
// and those that come back after a repair find it too, also when the listener is closed.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "comm.h"
#include "handle.h"
#include "logger.h"
#include "rails.h"
#include "settings.h"

namespace ftar::nccl {

struct Listener {
  explicit Listener(Core& c) : core(c) {}
  Core& core;
  std::string nonce;
  std::vector<int> rails;  // ours, by their position in the handle
  std::vector<std::unique_ptr<RecvComm>> arriving;  // not yet handed out
  std::deque<RecvComm*> ready;                      // those that accept may take
  std::unordered_set<uint64_t> seen;                // tags of all connections, so that no dead one begins again
};

class Core {
 public:
  Core(Settings settings, LogFunction log);  // throws std::invalid_argument, std::system_error
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const std::vector<Nic>& nics() const { return nics_; }
  Transport& transport() { return transport_; }
  Logger& logger() { return logger_; }
  bool one_rail() const { return one_rail_; }
  void warn_once(const std::string& about, std::string text);  // with the transport's lock

  Listener* listen(int device, unsigned char* handle);
  SendComm* connect(int device, const unsigned char* handle);  // throws std::invalid_argument
  RecvComm* accept(Listener& listener);                        // nullptr: nobody yet
  void close(Listener* listener);
  void close(Comm* comm);
  // No connection touches any memory after this; used at the end of the process, when NCCL may not have closed all.
  void shut_down();

  void established(RecvComm& comm, Listener& listener);
  int open() const { return open_; }

 private:
  std::vector<Nic> current_nics();
  void on_proven(Conn& conn);
  double on_tick(double now_ms);
  RecvComm* arrive(Listener& listener, const Hello& hello, uint64_t tag, const std::vector<int>& positions);

  const Settings settings_;
  const std::vector<Nic> nics_;
  const std::vector<std::vector<int>> preference_;
  const std::string secret_;
  const std::string id_;    // of this process, in the nonces of its listeners
  const std::string name_;  // of this process, in hellos
  const std::string token_key_;
  Logger logger_;
  Transport transport_;
  bool polls_carrier_ = false;
  bool one_rail_ = false;  // of this process; said when it started
  uint64_t connections_ = 0;
  std::map<std::string, Listener*> listeners_;           // by nonce
  std::unordered_map<uint64_t, RecvComm*> receivers_;    // by the link's tag
  std::unordered_map<Comm*, uint64_t> comms_;            // all; the tag of receivers
  std::unordered_set<std::string> warned_;
  std::atomic<int> open_{0};  // what NCCL holds
};

}  // namespace ftar::nccl
