// What a sender has to send, what it put on which connection, and what of that never arrived. Pure: no socket, no clock.
//
// Any connection may pull the next piece (a fragment) of any message. For every connection the fragments put there are
// remembered in order until their messages are complete. TCP delivers in order, so when a connection is lost, two
// numbers of the receiver say all: how many fragments it had completely from there, and how many bytes of the next one.
// What is missing goes to the head of the queue; everything else went on meanwhile.
//
// A connection has a number of its own, its generation. Lost generations stay questions until the receiver has answered:
// an answer that is lost with its connection is asked for again on the next one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fifo.h"
#include "frame.h"

namespace ftar {

// A message on its way: its bytes stay the caller's. `keep`, if set, lives until the message is complete or dropped.
struct OutMessage {
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
  uint64_t step = 0;
  uint32_t bucket = 0;
  uint32_t part = 0;
  bool ack_soon = true;
  std::shared_ptr<void> keep;
};

class Outbox {
 public:
  struct Question {
    int rail;
    uint32_t generation;
  };

  Outbox(size_t rails, uint64_t window_bytes) : window_(window_bytes), live_(rails) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  void push(OutMessage message);
  // The next fragment, of at most `most` bytes, for the connection of this rail. False: there is nothing to send, or the
  // window is full.
  bool next(int rail, uint64_t most, FrameHeader* header, const std::byte** payload);

  uint32_t opened(int rail);  // a new connection: its generation
  // The connection is gone. The generation to ask about; 0: nothing is in flight, so nothing is missing.
  uint32_t closed(int rail);
  uint32_t generation(int rail) const { return live_[static_cast<size_t>(rail)].generation; }
  bool unacknowledged(int rail) const;      // the connection has fragments of messages that are not complete
  std::vector<Question> questions() const;  // unanswered
  uint32_t keep_from(int rail) const;       // of this rail's generations the receiver may forget those below

  // The receiver's answer. Empty, or what is impossible about it; an answer that came already is no news. Take what
  // `have` says is complete (`complete`) first.
  std::string answered(const FrameHeader& have);
  // The receiver has all messages below `seq`: gives the next of them, false if there is none left.
  bool complete(uint64_t seq, OutMessage* done);

  uint64_t begun() const { return next_seq_; }  // all messages below were begun completely
  bool in_flight() const { return next_seq_ != base_seq_ || next_offset_ != 0; }
  // Bytes that the window lets through and no connection has taken yet; `head`: of these, what is left of the message
  // that the next fragment is from. False: nothing.
  bool waiting(uint64_t* bytes, uint64_t* head) const;
  uint64_t window() const { return window_; }
  static constexpr uint64_t kMaxAhead = 16384;  // messages begun and not complete
  static constexpr size_t kMaxQuestions = 256;

 private:
  struct Fragment {
    uint64_t seq = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
  };
  struct Live {
    uint32_t generation = 0;  // 0: no connection
    uint64_t pruned = 0;      // fragments put there before those in the list
    Fifo<Fragment> fragments;
  };
  struct Lost {
    int rail;
    uint32_t generation;
    uint64_t pruned;
    Fifo<Fragment> fragments;
  };
  bool may_begin(uint64_t at) const {
    return at < messages_.size() && at < kMaxAhead && (in_flight_ == 0 || in_flight_ + weight(messages_[at]) <= window_);
  }
  static uint64_t weight(const OutMessage& m) { return m.bytes == 0 ? 1 : m.bytes; }
  void prune(Live& live);

  const uint64_t window_;
  Fifo<OutMessage> messages_;  // the front one is base_seq_
  uint64_t base_seq_ = 0;      // all before are complete
  uint64_t next_seq_ = 0;      // the next new fragment: this message
  uint64_t next_offset_ = 0;   // from this byte
  uint64_t in_flight_ = 0;     // bytes of messages begun and not complete (an empty one counts as one)
  uint64_t queued_ = 0;        // bytes that no connection has taken yet
  std::deque<Fragment> again_;  // known to be missing, by (seq, offset)
  uint32_t generation_ = 0;
  std::vector<Live> live_;
  std::vector<Lost> lost_;
};

}  // namespace ftar
