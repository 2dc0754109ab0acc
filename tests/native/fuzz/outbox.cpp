// A sender's books under any answers of a receiver, true or not, and any sequence of connections: every fragment lies
// inside its message, and a message is given back once, in order, when the receiver says that it has it.
#include "outbox.h"

#include <memory>

#include "fuzz.h"

using namespace ftar;

namespace {

constexpr int kRails = 3;
constexpr uint64_t kWindow = 8192;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Cursor in(data, size);
  Outbox box(kRails, kWindow);
  uint32_t pushed = 0;
  uint32_t given_back = 0;
  const auto take_complete = [&](uint64_t seq) {
    OutMessage done;
    while (box.complete(seq, &done)) must(done.bucket == given_back++, "messages are given back in order, each once");
  };
  while (!in.empty()) {
    const uint8_t op = in.byte();
    const int rail = (op >> 4) % kRails;
    switch (op % 8) {
      case 0:
      case 1: {
        OutMessage m;
        m.bytes = in.byte() * 16u;
        // Exactly so much memory: what is read beyond it is seen.
        const std::shared_ptr<std::byte[]> memory(new std::byte[m.bytes]{});
        m.data = memory.get();
        m.keep = memory;
        m.bucket = pushed++;
        box.push(std::move(m));
        break;
      }
      case 2:
      case 3: {
        FrameHeader h;
        const std::byte* payload = nullptr;
        if (!box.next(rail, 1 + in.byte() * 8u, &h, &payload)) break;
        unsigned char bytes[FrameHeader::kSize];
        h.write(bytes);
        FrameHeader again;
        must(again.parse(bytes) == nullptr, "a receiver would take this fragment");
        must(h.seq >= given_back && h.seq < pushed, "a fragment is of a message that is not given back");
        volatile std::byte sum{};
        for (uint32_t i = 0; i < h.length; ++i) sum = sum ^ payload[i];
        break;
      }
      case 4:
        box.closed(rail);
        box.opened(rail);
        break;
      case 5: box.closed(rail); break;
      case 6: {
        FrameHeader have;
        have.rail = in.byte() % kRails;
        have.generation = in.byte() % 32;
        have.seq = in.byte();
        have.total = in.byte();
        have.offset = in.byte() * 8u;
        if (have.seq > box.begun()) break;  // link_send.cpp ends the link
        take_complete(have.seq);
        if (!box.answered(have).empty()) return 0;  // it does here, too
        break;
      }
      default:
        if (const uint64_t seq = in.byte(); seq <= box.begun()) take_complete(seq);
    }
    for (int i = 0; i < kRails; ++i) box.unacknowledged(i), box.keep_from(i);
    if (box.questions().size() > Outbox::kMaxQuestions) return 0;
    must(given_back <= box.begun() && box.begun() <= pushed, "what is complete was begun, and what was begun was pushed");
  }
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  const std::string pushes = std::string("\4\24\0\100\0\20\1\377\1\0", 10);  // two connections, four messages
  const std::string sends = std::string("\2\20\22\20\2\40\22\377\3\377\23\377", 12);
  const std::string loss = std::string("\5\26\0\1\0\1\4\22\377\2\377", 11);
  return {pushes + sends + '\7' + '\2', pushes + sends + loss, pushes + sends + loss + sends + '\7' + '\4', pushes + sends + "\5\25" + "\4\24" + sends};
}
