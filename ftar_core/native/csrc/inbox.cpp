// See inbox.h.
#include "inbox.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "outbox.h"

namespace ftar {

namespace {
constexpr uint64_t kLeastWindow = 64;       // options.h
constexpr uint64_t kMaxWindow = 1u << 30;  // options.h
}  // namespace

std::atomic<uint64_t>& held_by_process() {
  static std::atomic<uint64_t> held{0};
  return held;
}

const char* Inbox::opened(int rail, const FrameHeader& open) {
  Carrier& c = carriers_[static_cast<size_t>(rail)];
  if (c.generation != 0) return "a connection that declares itself twice";
  if (open.generation == 0) return "generation 0";
  if (open.generation <= lost_[static_cast<size_t>(rail)]) return "a connection that the sender gave up";
  if (open.total < kLeastWindow || open.total > kMaxWindow) return "a window that no sender can have (64 bytes to 1 GiB)";
  c = Carrier{};
  c.generation = open.generation;
  window_ = open.total;
  forget(rail, static_cast<uint32_t>(open.step));
  return nullptr;
}

Placement Inbox::refuse(const char* reason, bool fatal) {
  if (fatal) fault_ = reason;
  return {Placement::Kind::refused, nullptr, reason};
}

Placement Inbox::begins(int rail, const FrameHeader& h) {
  Carrier& c = carriers_[static_cast<size_t>(rail)];
  if (c.generation == 0 || h.generation != c.generation) return refuse("a data frame of another generation", false);
  if (h.seq < next_seq_) return refuse("bytes of a message that is complete", true);
  const uint64_t ahead = h.seq - next_seq_;
  if (ahead >= Outbox::kMaxAhead) return refuse("a message that is too far ahead", true);
  while (messages_.size() <= ahead) messages_.push_back({});
  InMessage& m = messages_[ahead];
  if (!m.known) {
    m.header = h;
    m.known = true;
  }
  if (m.header.total != h.total) return refuse("a message that changed its length", true);
  if (h.length > h.total - m.begun) return refuse("more bytes than the message has", true);
  if (!m.placed) {
    if (const char* reason = find_place(m)) return refuse(reason, false);
  }
  const Placement later{Placement::Kind::later, nullptr, nullptr};
  std::byte* into = nullptr;
  Bounce* bounce = nullptr;
  c.put_off = 0;
  if (m.placed) {
    into = m.into == nullptr ? nullptr : m.into + h.offset;  // an empty message may have no place
  } else {
    if (ahead == 0) return later;
    if (bounced_ + h.length > std::max<uint64_t>(window_, h.length)) return refuse("more bytes than the sender's window", true);
    auto made = std::make_unique<Bounce>();
    if (h.length > 0 && shelf_.room(h.length)) made->bytes.reset(new (std::nothrow) std::byte[h.length]);
    if (h.length > 0 && made->bytes == nullptr) {
      c.put_off = h.length;
      return later;
    }
    made->seq = h.seq;
    made->offset = h.offset;
    made->length = h.length;
    bounce = made.get();
    into = bounce->bytes.get();
    bounces_.push_back(std::move(made));
    bounced_ += h.length;
    shelf_.add(h.length);
    ++m.bounces;
  }
  m.begun += h.length;
  ++m.coming;
  c.in_data = true;
  c.bytes = 0;
  c.seq = h.seq;
  c.length = h.length;
  c.bounce = bounce;
  return {Placement::Kind::here, into, nullptr};
}

void Inbox::arrived(int rail, size_t bytes) {
  Carrier& c = carriers_[static_cast<size_t>(rail)];
  c.bytes += bytes;
  at(c.seq).got += bytes;
}

void Inbox::complete(int rail) {
  Carrier& c = carriers_[static_cast<size_t>(rail)];
  ++c.frames;
  c.bytes = 0;
  c.in_data = false;
  InMessage& m = at(c.seq);
  --m.coming;
  if (c.bounce == nullptr) return;
  c.bounce->whole = true;
  c.bounce = nullptr;
  if (m.placed) copy_out(c.seq);
}

void Inbox::closed(int rail) {
  Carrier& c = carriers_[static_cast<size_t>(rail)];
  if (c.generation == 0) return;
  if (c.in_data) {
    if (c.bytes == c.length) {
      complete(rail);
    } else {
      InMessage& m = at(c.seq);
      m.begun -= c.length - c.bytes;
      --m.coming;
      if (c.bounce != nullptr) {
        let_go(c.length - c.bytes);
        c.bounce->length = c.bytes;
        c.bounce->whole = true;
        if (m.placed) copy_out(c.seq);
      }
    }
  }
  ended_.push_back({rail, c.generation, c.frames, c.bytes});
  if (ended_.size() > Outbox::kMaxQuestions) fault_ = "too many connections were lost before the sender could ask about them";
  c = Carrier{};
}

void Inbox::let_go(uint64_t bytes) {
  bounced_ -= bytes;
  shelf_.take(bytes);
}

void Inbox::give_up() {
  for (Carrier& c : carriers_) {
    c.bounce = nullptr;
    c.put_off = 0;
  }
  bounces_.clear();
  let_go(bounced_);
}

bool Inbox::crowded() const {
  return std::any_of(carriers_.begin(), carriers_.end(), [](const Carrier& c) { return c.put_off > 0; });
}

bool Inbox::room() const {
  return std::any_of(carriers_.begin(), carriers_.end(), [&](const Carrier& c) { return c.put_off > 0 && shelf_.room(c.put_off); });
}

bool Inbox::stuck() const {
  if (!crowded() || messages_.empty()) return false;
  const InMessage& m = messages_.front();  // unknown: none of it came yet
  return !m.known || (m.placed && m.coming == 0 && m.got < m.header.total);
}

void Inbox::forget(int rail, uint32_t keep_from) {
  std::erase_if(ended_, [&](const Ended& e) { return e.rail == rail && e.generation < keep_from; });
}

void Inbox::lost(int rail, const FrameHeader& lost, FrameHeader* have) {
  uint32_t& highest = lost_[static_cast<size_t>(rail)];
  highest = std::max(highest, lost.generation);
  have->rail = static_cast<uint16_t>(rail);
  have->generation = lost.generation;
  have->seq = next_seq_;
  have->total = have->offset = 0;
  for (const Ended& e : ended_) {
    if (e.rail != rail || e.generation != lost.generation) continue;
    have->total = e.frames;
    have->offset = e.bytes;
  }
  forget(rail, static_cast<uint32_t>(lost.step));
}

const char* Inbox::find_place(InMessage& m) {
  const Placement place = sink_.place(m.header);
  if (place.kind == Placement::Kind::refused) return place.reason;
  if (place.kind == Placement::Kind::later) return nullptr;
  m.placed = true;
  m.into = place.into;
  if (m.bounces > 0) copy_out(m.header.seq);
  return nullptr;
}

// What is whole goes to its place; a fragment that is still coming follows when it is.
void Inbox::copy_out(uint64_t seq) {
  InMessage& m = at(seq);
  std::erase_if(bounces_, [&](const std::unique_ptr<Bounce>& b) {
    if (b->seq != seq || !b->whole) return false;
    if (b->length > 0) std::memcpy(m.into + b->offset, b->bytes.get(), b->length);
    let_go(b->length);
    --m.bounces;
    return true;
  });
}

void Inbox::find_places() {
  for (size_t i = 0; i < messages_.size() && !bounces_.empty(); ++i) {
    InMessage& m = messages_[i];
    if (m.placed || m.bounces == 0) continue;
    if (find_place(m) != nullptr) return;  // the user has ended the link
  }
}

bool Inbox::next(FrameHeader* message) {
  if (messages_.empty()) return false;
  InMessage& m = messages_.front();
  if (!m.placed && m.bounces > 0 && find_place(m) != nullptr) return false;
  if (!m.placed || m.got < m.header.total || m.coming > 0 || m.bounces > 0) return false;
  // An empty message is complete when its only frame is; it was placed by that frame.
  *message = m.header;
  messages_.pop_front();
  ++next_seq_;
  return true;
}

}  // namespace ftar
