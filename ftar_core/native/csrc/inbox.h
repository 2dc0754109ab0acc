// What a receiver has: messages in progress, and by connection how much came on it. Pure: no socket, no clock.
//
// Fragments of any message may come over any connection. Each goes straight to the place that the user names for its
// message; a message is handed out when all its bytes are there and all before it were handed out. Every byte comes once
// by construction (outbox.h), which is checked: more bytes than a message has end the link.
//
// The user may have no place yet. For the first message that is not complete the connection waits. For a later one it must
// not: behind its fragment there may be one of the first message, sent again, and nothing would move any more. So it goes
// to memory of ours, which the sender's window bounds, and is copied when the place is known. All links of a process
// together have a bound for that too (Shelf): beyond it the connection waits after all, and if what the user waits for
// is behind that fragment (`stuck`), the connection is made anew: what is missing is then sent in order.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fifo.h"
#include "frame.h"
#include "rail.h"

namespace ftar {

class RecvSink {
 public:
  virtual ~RecvSink() = default;
  // Where message.total bytes go. Not always asked in the order of message.seq, and again until it is `here`.
  virtual Placement place(const FrameHeader& message) = 0;
  virtual void received(const FrameHeader& message) = 0;  // in the order of message.seq
};

// What the inboxes of a process hold for messages that have no place yet. A fragment fits if nothing else is held.
class Shelf {
 public:
  Shelf(std::atomic<uint64_t>& held, uint64_t most_bytes) : held_(held), most_(most_bytes) {}
  bool room(uint64_t bytes) const {
    const uint64_t held = held_.load(std::memory_order_relaxed);
    return held == 0 || held + bytes <= most_;
  }
  void add(uint64_t bytes) { held_ += bytes; }
  void take(uint64_t bytes) { held_ -= bytes; }

 private:
  std::atomic<uint64_t>& held_;
  const uint64_t most_;
};
std::atomic<uint64_t>& held_by_process();

class Inbox {
 public:
  Inbox(RecvSink& sink, size_t rails, Shelf shelf) : sink_(sink), shelf_(shelf), carriers_(rails), lost_(rails, 0) {}
  ~Inbox() { give_up(); }
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  // The connection of a rail declares its generation. nullptr, or why it must end.
  const char* opened(int rail, const FrameHeader& open);
  Placement begins(int rail, const FrameHeader& data);
  void arrived(int rail, size_t bytes);
  void complete(int rail);
  void closed(int rail);  // the connection is gone; what came on it is remembered
  uint32_t generation(int rail) const { return carriers_[static_cast<size_t>(rail)].generation; }

  // The sender lost this generation of the rail; the caller has closed it here. Fills the answer.
  void lost(int rail, const FrameHeader& lost, FrameHeader* have);

  bool next(FrameHeader* message);  // the next message, if it is complete
  void find_places();               // for what waits in our memory
  void give_up();                   // the link is over: nothing of what waits will be asked for
  bool crowded() const;  // a fragment was put off because the process holds too much
  bool room() const;     // one of those would not be now
  bool stuck() const;    // crowded, and what the user waits for may be behind
  bool waits() const { return bounced_ > 0 || !bounces_.empty() || crowded(); }
  uint64_t next_seq() const { return next_seq_; }
  const std::string& fault() const { return fault_; }  // the link cannot go on

 private:
  struct InMessage {
    FrameHeader header;
    bool known = false;
    bool placed = false;
    std::byte* into = nullptr;
    uint64_t begun = 0;    // bytes of fragments that came or are coming
    uint64_t got = 0;
    uint32_t coming = 0;   // fragments in the middle of their way
    uint32_t bounces = 0;  // fragments in our memory
  };
  struct Bounce {
    uint64_t seq;
    uint64_t offset;
    uint64_t length;
    std::unique_ptr<std::byte[]> bytes;
    bool whole = false;
  };
  struct Carrier {
    uint32_t generation = 0;  // 0: no connection, or it did not say yet
    uint64_t frames = 0;      // complete
    uint64_t bytes = 0;       // of the present one
    bool in_data = false;
    uint64_t seq = 0;         // of the present one
    uint64_t length = 0;
    Bounce* bounce = nullptr;
    uint64_t put_off = 0;     // bytes of the fragment that waits for room
  };
  struct Ended {
    int rail;
    uint32_t generation;
    uint64_t frames;
    uint64_t bytes;
  };
  Placement refuse(const char* reason, bool fatal);
  InMessage& at(uint64_t seq) { return messages_[seq - next_seq_]; }
  const char* find_place(InMessage& message);  // nullptr, or why the user refuses it
  void copy_out(uint64_t seq);
  void forget(int rail, uint32_t keep_from);

  void let_go(uint64_t bytes);

  RecvSink& sink_;
  Shelf shelf_;
  uint64_t next_seq_ = 0;
  Fifo<InMessage> messages_;  // the front one is next_seq_
  std::vector<Carrier> carriers_;
  std::vector<uint32_t> lost_;  // by rail: the highest generation that the sender gave up
  std::vector<Ended> ended_;
  std::vector<std::unique_ptr<Bounce>> bounces_;
  uint64_t bounced_ = 0;
  uint64_t window_ = 0;  // the sender's
  std::string fault_;
};

}  // namespace ftar
