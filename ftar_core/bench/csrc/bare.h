// The peers that measure what TCP itself costs: the plainest code that moves the same bytes.
#pragma once
#include <array>
#include <cstdint>

#include "channel.h"

namespace ftar::bench {

// A connected TCP socket, one way. A message is 8 bytes of length and its bytes; a send is done when the kernel has taken
// all of it (as NCCL's built-in sockets have it), a receive when all is there. Nothing is acknowledged, nothing survives
// anything. One system call moves a message if the kernel takes it whole. A receive must ask for just the size that comes.
class SocketChannel final : public Channel {
 public:
  explicit SocketChannel(int fd);  // takes it over
  ~SocketChannel() override;
  SocketChannel(const SocketChannel&) = delete;
  SocketChannel& operator=(const SocketChannel&) = delete;

  void* isend(const void* data, size_t bytes) override;
  void* irecv(void* into, size_t bytes) override;
  bool test(void* request, size_t* bytes) override;
  void close() override;

 private:
  struct Slot {
    char* data = nullptr;
    uint64_t bytes = 0;   // as asked
    uint64_t header = 0;  // as on the wire
    size_t at = 0;        // of header and data together
    bool sending = false;
    bool done = false;
  };
  static constexpr size_t kSlots = 64;
  void* post(char* data, size_t bytes, bool sending);
  void progress();

  int fd_;
  std::array<Slot, kSlots> slots_;
  uint64_t posted_ = 0;
  uint64_t moved_ = 0;   // complete on the wire
  uint64_t taken_ = 0;   // test has said so
};

// The traffic of a ring all-reduce without its sums, in one thread: 2(n-1) rounds, in each a segment to the next rank and
// one from the previous, at the same time.
class Ring {
 public:
  Ring(int out, int into, int ranks);  // borrows connected TCP sockets
  void run(const void* send, void* receive, size_t bytes);  // throws std::runtime_error

 private:
  void exchange(const char* send, char* receive, size_t bytes);
  int out_;
  int into_;
  int ranks_;
};

}  // namespace ftar::bench
