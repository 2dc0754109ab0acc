// Connections as NCCL sees them: one link each, with requests that match in posting order.
//
// A request is a slot of its connection. It is taken under the transport's lock, completed under it (by whichever thread
// moves the bytes) and looked at and given back by NCCL's thread without any lock: `test` is called in a loop.
//
//     FREE --isend, irecv--> POSTED --the receiver has all bytes / the message is in place--> DONE --test--> FREE
//
// A connection that is over keeps its finished requests: what was done is done, all others answer with the error.
#pragma once
#include <atomic>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "../link.h"
#include "abi.h"

namespace ftar::nccl {

class Core;
class Comm;
struct Listener;

struct Request {
  enum State : int { free, posted, done };
  std::atomic<int> state{free};
  std::atomic<uint64_t> bytes{0};
  Comm* comm = nullptr;
};

class Comm : public LinkOwner {
 public:
  explicit Comm(Core& core);
  ~Comm() override = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  virtual LinkEnd& link() = 0;
  // Moves bytes in the caller's thread unless another thread is at it: NCCL asks in a loop, and a core that loops without
  // moving anything is one that the I/O thread does not have.
  void progress();
  // 0 or the error that every further call gets.
  Result error() const { return error_.load(std::memory_order_acquire); }
  void fail(Result error, const std::string& reason);  // with the lock; closes the link
  Core& core() { return core_; }

  void link_ready(LinkEnd& link) override;
  void link_warns(LinkEnd& link, int slot, const std::string& text) override;
  void link_rail(LinkEnd& link, const RailChange& change) override;
  void link_moved(LinkEnd& link, int slot, const std::string& reason) override;
  void link_unreachable(LinkEnd& link, const std::string& reason) override;
  void link_over(LinkEnd& link, const std::string& reason, bool left_epoch) override;

 protected:
  Request* take();  // nullptr: all are in use
  std::string describe(int slot);  // "10.77.0.2 by rail0"

  Core& core_;

 private:
  // More than NCCL has in flight, so that a request it has not yet tested does not hold up the next.
  std::array<Request, 2 * kMaxRequests> requests_;
  size_t next_ = 0;
  std::atomic<Result> error_{kSuccess};
};

class SendComm final : public Comm {
 public:
  SendComm(Core& core, LinkName name, std::vector<LinkRail> rails);
  LinkEnd& link() override { return link_; }
  Request* send(const void* data, uint64_t bytes);  // nullptr: try later

 private:
  Fifo<Request*> posted_;
  SendLink link_;
};

class RecvComm final : public Comm, public RecvSink {
 public:
  RecvComm(Core& core, LinkName name, std::vector<LinkRail> rails, Listener* listener);
  LinkEnd& link() override { return link_; }
  RecvLink& recv_link() { return link_; }
  Request* receive(void* into, uint64_t bytes);  // nullptr: try later
  void forget_listener() { listener_ = nullptr; }

  void link_ready(LinkEnd& link) override;
  Placement place(const FrameHeader& message) override;
  void received(const FrameHeader& message) override;

 private:
  struct Place {
    Request* request = nullptr;
    std::byte* into = nullptr;
    uint64_t bytes = 0;
  };
  Fifo<Place> posted_;  // the front one is for message first_
  uint64_t first_ = 0;
  Listener* listener_;  // until it is handed out by accept
  RecvLink link_;
};

}  // namespace ftar::nccl
