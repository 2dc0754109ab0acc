// A receiver's books under any sequence of connections, fragments and questions that a peer can send: no fragment lands
// outside the memory that its message got, messages are handed out once and in order, and memory of ours is bounded.
#include "inbox.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>

#include "fuzz.h"
#include "outbox.h"

using namespace ftar;

namespace {

constexpr size_t kRails = 3;
constexpr uint64_t kRoom = 1 << 14;

class Sink final : public RecvSink {
 public:
  Placement place(const FrameHeader& m) override {
    if (m.total > kRoom) return {Placement::Kind::refused, nullptr, "too large"};
    if (m.seq >= places) return {Placement::Kind::later, nullptr, nullptr};
    auto& memory = memory_[m.seq];
    if (memory == nullptr) memory = std::make_unique<std::byte[]>(std::max<uint64_t>(1, m.total));
    return {Placement::Kind::here, memory.get(), nullptr};
  }
  void received(const FrameHeader& m) override {
    must(m.seq == next_++, "messages are handed out in order, each once");
    memory_.erase(m.seq);
  }
  uint64_t places = 0;  // of messages below this the place is known

 private:
  std::map<uint64_t, std::unique_ptr<std::byte[]>> memory_;
  uint64_t next_ = 0;
};

// What rail.cpp does with a connection's bytes.
struct Carrying {
  bool open = false;
  std::byte* into = nullptr;
  uint64_t left = 0;
  bool in_data = false;
};

FrameHeader header(FrameType type, Cursor* in) {
  FrameHeader h;
  h.type = type;
  h.rail = in->byte() % kRails;
  h.generation = in->byte() % 16;
  h.seq = in->byte() % 8;
  h.offset = in->byte() * 64u;
  h.length = in->byte() * 64u;
  h.total = in->byte() * 64u;
  h.step = in->byte() % 16;
  return h;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Cursor in(data, size);
  Sink sink;
  sink.places = in.byte() % 4;
  std::atomic<uint64_t> held{0};
  const uint64_t most = 64u << (in.byte() % 8);
  Inbox inbox(sink, kRails, Shelf(held, most));
  Carrying rails[kRails];
  const auto gone = [&](int rail) {
    if (rails[rail].open) inbox.closed(rail);
    rails[rail] = {};
  };
  while (!in.empty() && inbox.fault().empty()) {
    const uint8_t op = in.byte();
    const int rail = (op >> 4) % static_cast<int>(kRails);
    Carrying& c = rails[rail];
    switch (op % 8) {
      case 0: {
        const FrameHeader open = header(FrameType::open, &in);
        c.open = true;
        if (c.in_data || inbox.opened(rail, open) != nullptr) gone(rail);
        break;
      }
      case 1:
      case 2: {
        FrameHeader h = header(FrameType::data, &in);
        unsigned char bytes[FrameHeader::kSize];
        h.write(bytes);
        if (!c.open || c.in_data || h.parse(bytes) != nullptr) break;
        const Placement place = inbox.begins(rail, h);
        if (place.kind == Placement::Kind::refused) gone(rail);
        if (place.kind != Placement::Kind::here) break;
        c.in_data = true;
        c.into = place.into;
        c.left = h.length;
        break;
      }
      case 3:
      case 4: {
        if (!c.in_data) break;
        const uint64_t n = std::min<uint64_t>(c.left, in.byte() * (op & 8 ? 64u : 1u));
        if (n > 0) std::memset(c.into, op, n);
        c.into += n;
        c.left -= n;
        inbox.arrived(rail, n);
        if (c.left > 0) break;
        c.in_data = false;
        inbox.complete(rail);
        break;
      }
      case 5: gone(rail); break;
      case 6: {
        const FrameHeader lost = header(FrameType::lost, &in);
        if (inbox.generation(lost.rail) == lost.generation) gone(lost.rail);
        FrameHeader have;
        inbox.lost(lost.rail, lost, &have);
        break;
      }
      default:
        sink.places += op >> 5;
        inbox.find_places();
    }
    FrameHeader message;
    while (inbox.next(&message)) sink.received(message);
    must(held <= std::max<uint64_t>(most, 255 * 64), "what is held is bounded");
    must(!inbox.stuck() || inbox.crowded(), "stuck for want of room only");
  }
  inbox.give_up();
  must(held == 0, "all of it is given back");
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  // open, a message in two fragments over two rails, then a loss and its question
  const std::string opens = std::string("\0\0\1\0\0\0\100\0", 8) + std::string("\20\1\2\0\0\0\100\0", 8);
  const std::string halves = std::string("\1\0\1\0\0\1\2\0", 8) + std::string("\21\1\2\0\1\1\2\0", 8) + "\13\1\33\1";
  const std::string later = std::string("\1\0\1\1\0\1\1\0", 8) + "\13\1" + std::string("\21\1\2\0\0\1\1\0", 8) + "\33\1";
  const std::string lost = "\5" + std::string("\26\0\1\0\0\0\0\0", 8);
  const auto begun = [](char places, char room) { return std::string{places, room}; };
  return {begun(3, 7) + opens + halves + lost, begun(0, 7) + opens + later + "\57" + lost, begun(2, 7) + opens + later + halves,
          begun(0, 0) + opens + later + later + halves + lost};
}
