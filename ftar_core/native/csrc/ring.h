// All-reduce over a ring of members: reduce-scatter, then all-gather, chunk by chunk.
//
// Member i sends to member i+1. A buffer is cut into one segment per member; segment g starts at member g and travels
// once around, each member adding its own part (reduce-scatter); the sum then travels around once more (all-gather).
// Segments are cut into chunks, and a chunk is passed on as soon as it is there, so that both directions of the wire and
// the adding overlap. The order of additions for an element depends on its segment and the members' slots only: the
// same bits everywhere, whatever the timing and whichever rail carried them.
//
// Where things lie: `dst` is the working buffer. The incoming partial sum of a chunk is received straight into dst, src
// is added there, and it is sent on from there; the final sum overwrites it later. That is safe although dst is also
// the copy to send again, because a final sum of a chunk can only exist after the next member has received our part of
// it, and a receiver never asks again for what it has. src is only read.
//
// Where memory is a device's (submit with a passage), all this is the same, but bytes pass between it and the links by
// slots of pinned host memory, and the device adds (ring_device.cpp): what comes in goes to dst there, what goes out is
// fetched from there. Members of one ring may differ in this: the same messages, the same bits.
//
// Small buffers take another way: everybody's copy travels the ring and each member adds up for itself, in the same
// order as above, hence with the same bits. Half the latency, and nobody waits for acknowledgements, as the copies are
// the operation's own.
//
// Order: members may submit buckets in any order. A chunk that arrives for an operation that is not submitted yet stays
// in the socket and holds the sender back (bounded by the socket buffers and the window). This cannot deadlock, since
// submitting never waits for a result: once a member has submitted what the others have, everything that arrives has a
// place. What would deadlock is a caller that waits for one bucket before it submits another that its peers put first.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "link.h"
#include "passage.h"
#include "reduce.h"

namespace ftar {

// A message's part: its hop, and the chunk of the segment.
constexpr int kChunkBits = 20;
constexpr uint32_t kChunkMask = (1u << kChunkBits) - 1;
constexpr uint32_t part(int hop, uint64_t index) {
  return (static_cast<uint32_t>(hop) << kChunkBits) | static_cast<uint32_t>(index);
}
constexpr uint64_t kSmallBytesOfTwo = 128 * 1024;  // the largest operation of which copies travel (ring.cpp)

struct Member {
  std::string name;
  uint64_t incarnation = 0;
  struct Endpoint {
    std::string rail;
    std::string address;
    int port = 0;
  };
  std::vector<Endpoint> rails;
};

struct Event {
  std::string type;
  std::string epoch;
  uint64_t step = 0;
  uint32_t bucket = 0;
  std::string peer;
  std::string rail;
  std::string direction;
  std::string state;
  std::string reason;
  bool active = false;
  double detect_ms = 0;
  double time_s = 0;
};

struct LinkStat {
  std::string peer;
  std::string rail;
  std::string direction;
  std::string state;
  bool active = false;
  std::string reason;
  double since_s = 0;
  int flaps = 0;
  int resumes = 0;
  uint64_t bytes = 0;
  int hold_left_ms = 0;
};

// The middle of a bucket as a place to fail at (runtime/breakpoints.py): own chunks are sent, the first of others is here.
struct Breakpoint {
  bool armed = false;
  uint64_t step = 0;    // this one or later
  int64_t bucket = -1;  // -1: any
  int signal = 0;       // sent to the own process

  void passed(uint64_t at_step, uint32_t at_bucket);
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void emit(Event event) = 0;

  Breakpoint breakpoint;  // by the transport's lock
};

// Which rail of one member leads to which rail of another: by name, or by position if they share no name.
std::vector<std::pair<int, int>> pair_rails(const Member& from, const Member& to);

class Ring final : public LinkOwner, public RecvSink {
 public:
  // Throws std::invalid_argument for members that cannot make a ring. Links connect in the background.
  Ring(Transport& transport, EventSink& events, std::string epoch, std::vector<Member> members, int me);

  void start();  // a ring of one is ready at once
  void tick(double now_ms);
  void activate() { active_ = true; }
  // Empty, or why an operation like this cannot be (std::invalid_argument for the caller).
  std::string problem(uint64_t step, uint32_t bucket, uint64_t count, DType dtype) const;
  // inline_send: the caller will wait and carries the bytes itself, whatever their number.
  void submit(uint64_t step, uint32_t bucket, const void* src, void* dst, uint64_t count, DType dtype, bool inline_send,
              Passage* passage = nullptr);  // src and dst are on its device
  void device_news();  // it has done something, or failed
  void admit(Conn& conn);  // a proven connection that names this epoch
  void add_open(std::vector<Conn*>* out) const;  // the connections of both links
  bool idle() const { return operations_.empty(); }
  void asked();     // somebody who carries the bytes himself will come again: the I/O thread keeps away for some ticks
  void take_back();  // for the I/O thread, what somebody carried
  void close(const std::string& reason, bool left_epoch);
  std::vector<LinkStat> links(double now_ms) const;
  const std::string& epoch() const { return epoch_; }

  void link_ready(LinkEnd& link) override;
  void link_rail(LinkEnd& link, const RailChange& change) override;
  void link_moved(LinkEnd& link, int slot, const std::string& reason) override;
  void link_unreachable(LinkEnd& link, const std::string& reason) override;
  void link_over(LinkEnd& link, const std::string& reason, bool left_epoch) override;
  Placement place(const FrameHeader& message) override;
  void received(const FrameHeader& message) override;

 private:
  // Memory of earlier copies: fresh pages for each operation would cost more than the copying.
  using Spares = std::vector<std::vector<std::byte>>;
  static constexpr size_t kMaxSpare = 1u << 20;
  static constexpr size_t kMaxSpares = 16;
  struct Operation {
    uint64_t step;
    uint32_t bucket;
    const std::byte* src;
    std::byte* dst;
    uint64_t count;
    DType dtype;
    size_t element;
    bool small;
    uint64_t to_place = 0;    // messages
    uint64_t to_receive = 0;
    uint64_t to_acknowledge = 0;
    std::vector<std::byte> copies;  // small: one per member, by slot
    std::shared_ptr<Spares> spares;
    Passage* passage = nullptr;     // nullptr: src and dst are host memory
    uint64_t to_settle = 0;         // what the device has yet to do before dst is complete
    bool own_copy = true;           // small: it is among the copies
    std::unordered_map<uint32_t, int> slots;  // by part: where a message comes in
    ~Operation() {
      if (spares && copies.size() <= kMaxSpare && spares->size() < kMaxSpares) spares->push_back(std::move(copies));
    }
  };
  struct Chunk {
    uint64_t at;     // first element
    uint64_t count;  // elements
  };
  using Key = std::pair<uint64_t, uint32_t>;

  int wrap(int slot) const { return ((slot % size_) + size_) % size_; }
  int hops() const { return 2 * (size_ - 1); }
  int received_segment(int hop) const;
  uint64_t segment_begin(const Operation& op, int segment) const;
  uint64_t chunks(const Operation& op, int segment) const;
  Chunk chunk(const Operation& op, int segment, uint64_t index) const;
  void send_segment(const std::shared_ptr<Operation>& op);
  void send_chunk(const std::shared_ptr<Operation>& op, int hop, uint64_t index, const std::byte* from, Chunk c);
  void send_copy(const std::shared_ptr<Operation>& op, int hop, int origin);
  void add_copies(Operation& op, std::byte* into);
  void submit_on_device(const std::shared_ptr<Operation>& op);
  Placement place_on_device(Operation& op, const FrameHeader& message);
  void received_on_device(const std::shared_ptr<Operation>& op, uint32_t message_part);
  void fetch_chunk(const std::shared_ptr<Operation>& op, int hop, uint64_t index, Chunk c, int slot, const std::byte* from,
                   uint64_t behind);
  void send_slot(const std::shared_ptr<Operation>& op, int hop, uint64_t index, Chunk c, int slot);
  void add_copies_for_device(const std::shared_ptr<Operation>& op);
  void settled(Operation& op, int slot);
  void device_turn();
  void sent(const OutMessage& message);
  void maybe_done(Operation& op);
  void break_down(const std::string& reason);
  Event event(const char* type) const;

  Transport& transport_;
  EventSink& events_;
  const std::string epoch_;
  const std::vector<Member> members_;
  const int me_;
  const int size_;
  std::unique_ptr<SendLink> out_;
  std::unique_ptr<RecvLink> in_;
  std::map<Key, std::shared_ptr<Operation>> operations_;
  std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
  bool active_ = false;
  bool ready_told_ = false;
  Passage* passage_ = nullptr;  // the operations' that are on a device
  uint64_t next_seq_ = 0;       // of the message that must come next
  bool to_pump_ = false;        // something was made ready to be sent
  bool room_ = false;           // for messages that had no slot
  std::string broken_;       // why no operation can complete here any more
  double break_at_ms_ = -1;  // it will be broken then, unless a better reason comes first
  std::string break_reason_;
  std::string gone_told_;    // the peer whose end was reported
};

}  // namespace ftar
