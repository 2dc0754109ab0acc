// See ring.h.
#include "ring.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ftar {

namespace {

constexpr int kMaxMembers = 2048;  // two rounds of hops fit the bits of a part
// Up to here every member's copy travels: the wire time of the copies is below what one more hop costs. Two members
// send as many bytes either way, so they save a hop and the acknowledgements at any size; the copies' memory is the limit
// (kSmallBytesOfTwo).
constexpr uint64_t kSmallBytes = 8192;
// Up to here a caller sends by itself instead of waking the I/O thread: the copy to the kernel costs less than the wake-up.
constexpr uint64_t kInlineBytes = 32768;

}  // namespace

void Breakpoint::passed(uint64_t at_step, uint32_t at_bucket) {
  if (at_step < step || (bucket >= 0 && bucket != static_cast<int64_t>(at_bucket))) return;
  armed = false;
  ::kill(::getpid(), signal);
}

std::vector<std::pair<int, int>> pair_rails(const Member& from, const Member& to) {
  std::vector<std::pair<int, int>> pairs;
  for (size_t i = 0; i < from.rails.size(); ++i) {
    for (size_t j = 0; j < to.rails.size(); ++j) {
      if (from.rails[i].rail == to.rails[j].rail) pairs.emplace_back(static_cast<int>(i), static_cast<int>(j));
    }
  }
  if (pairs.empty()) {
    const size_t n = std::min(from.rails.size(), to.rails.size());
    for (size_t i = 0; i < n; ++i) pairs.emplace_back(static_cast<int>(i), static_cast<int>(i));
  }
  return pairs;
}

Ring::Ring(Transport& transport, EventSink& events, std::string epoch, std::vector<Member> members, int me)
    : transport_(transport),
      events_(events),
      epoch_(std::move(epoch)),
      members_(std::move(members)),
      me_(me),
      size_(static_cast<int>(members_.size())) {
  if (members_.empty()) throw std::invalid_argument("a ring needs at least one member");
  if (size_ > kMaxMembers) throw std::invalid_argument("a ring can have at most 2048 members");
  if (me < 0 || me >= size_) throw std::invalid_argument("`me` is not an index of `members`");
  for (int i = 0; i < size_; ++i) {
    const Member& m = members_[static_cast<size_t>(i)];
    if (m.name.empty() || m.name.size() > 127) throw std::invalid_argument("a member's name must have 1 to 127 characters");
    for (int k = 0; k < i; ++k) {
      if (members_[static_cast<size_t>(k)].name == m.name) throw std::invalid_argument("two members are called " + m.name);
    }
  }
  if (size_ == 1) return;
  const Member& self = members_[static_cast<size_t>(me_)];
  const Member& next = members_[static_cast<size_t>(wrap(me_ + 1))];
  const Member& previous = members_[static_cast<size_t>(wrap(me_ - 1))];
  const auto local = [&](const std::string& rail) {
    for (size_t i = 0; i < transport_.ports().size(); ++i) {
      if (transport_.ports()[i].config.name == rail) return static_cast<int>(i);
    }
    throw std::invalid_argument("member " + self.name + " is listed with rail " + rail + ", which is not a rail of this engine");
  };
  const auto rails = [&](const Member& from, const Member& to, bool sending) {
    std::vector<LinkRail> out;
    for (const auto& [i, j] : pair_rails(from, to)) {
      const Member::Endpoint& a = from.rails[static_cast<size_t>(i)];
      const Member::Endpoint& b = to.rails[static_cast<size_t>(j)];
      LinkRail rail;
      rail.local = local(sending ? a.rail : b.rail);
      rail.name = a.rail;
      const Member& peer = sending ? to : from;
      const Member::Endpoint& there = sending ? b : a;
      const RailPort& port = transport_.ports()[static_cast<size_t>(rail.local)];
      rail.remote = parse_address(there.address, there.port, port.config.device);
      if (rail.remote.family() != port.address.family()) {
        throw std::invalid_argument("rail " + a.rail + ": " + there.address + " of " + peer.name + " and " +
                                    port.address.host() + " here are not of one family (IPv4, IPv6)");
      }
      out.push_back(std::move(rail));
    }
    if (out.empty()) throw std::invalid_argument("no rail leads from " + from.name + " to " + to.name);
    return out;
  };
  const auto name = [&](const Member& from, const Member& to) {
    return LinkName{epoch_, from.name, to.name, from.incarnation, to.incarnation};
  };
  std::vector<LinkRail> to_next = rails(self, next, true);
  std::vector<LinkRail> from_previous = rails(previous, self, false);
  out_ = std::make_unique<SendLink>(transport_, *this, name(self, next), std::move(to_next),
                                    [this](const OutMessage& m) { sent(m); });
  in_ = std::make_unique<RecvLink>(transport_, *this, name(previous, self), std::move(from_previous), *this);
}

Event Ring::event(const char* type) const {
  Event e;
  e.type = type;
  e.epoch = epoch_;
  return e;
}

void Ring::start() {
  if (size_ == 1 && !ready_told_) {
    ready_told_ = true;
    events_.emit(event("ready"));
  }
}

void Ring::tick(double now) {
  if (out_) out_->tick(now);
  if (in_) in_->tick(now);
  if (passage_ != nullptr) device_news();
  if (break_at_ms_ >= 0 && now >= break_at_ms_) break_down(break_reason_);
}

int Ring::received_segment(int hop) const {
  return hop < size_ - 1 ? wrap(me_ - hop - 1) : wrap(me_ - (hop - (size_ - 1)));
}

uint64_t Ring::segment_begin(const Operation& op, int segment) const {
  const auto n = static_cast<uint64_t>(size_);
  const auto g = static_cast<uint64_t>(segment);
  return op.count / n * g + op.count % n * g / n;  // count * g / n without overflow
}

uint64_t Ring::chunks(const Operation& op, int segment) const {
  const uint64_t elements = segment_begin(op, segment + 1) - segment_begin(op, segment);
  const uint64_t per_chunk = static_cast<uint64_t>(transport_.options().chunk_bytes) / op.element;
  return (elements + per_chunk - 1) / per_chunk;
}

Ring::Chunk Ring::chunk(const Operation& op, int segment, uint64_t index) const {
  const uint64_t per_chunk = static_cast<uint64_t>(transport_.options().chunk_bytes) / op.element;
  const uint64_t at = segment_begin(op, segment) + index * per_chunk;
  return {at, std::min(per_chunk, segment_begin(op, segment + 1) - at)};
}

std::string Ring::problem(uint64_t step, uint32_t bucket, uint64_t count, DType dtype) const {
  const std::string what = "bucket " + std::to_string(bucket) + " of step " + std::to_string(step);
  if (count > (uint64_t{1} << 48)) return what + " is too large";
  const uint64_t per_chunk = static_cast<uint64_t>(transport_.options().chunk_bytes) / element_bytes(dtype);
  if (count / static_cast<uint64_t>(size_) / per_chunk >= kChunkMask) {
    return what + " has more than a million chunks a member: make chunk_bytes larger";
  }
  if (operations_.contains({step, bucket})) return what + " is already being reduced";
  return "";
}

void Ring::submit(uint64_t step, uint32_t bucket, const void* src, void* dst, uint64_t count, DType dtype,
                  bool inline_send, Passage* passage) {
  const auto report = [&](const char* type, const std::string& reason) {
    Event e = event(type);
    e.step = step;
    e.bucket = bucket;
    e.reason = reason;
    events_.emit(std::move(e));
  };
  if (!broken_.empty()) return report("failed", broken_);
  auto op = std::make_shared<Operation>();
  op->step = step;
  op->bucket = bucket;
  op->src = static_cast<const std::byte*>(src);
  op->dst = static_cast<std::byte*>(dst);
  op->count = count;
  op->dtype = dtype;
  op->element = element_bytes(dtype);
  const uint64_t bytes = count * op->element;
  op->small = bytes <= (size_ == 2 ? kSmallBytesOfTwo : kSmallBytes);
  op->passage = count == 0 ? nullptr : passage;
  if (op->passage != nullptr && size_ == 1) return submit_on_device(op);
  if (size_ == 1 || count == 0) {
    if (bytes > 0) std::memcpy(op->dst, op->src, bytes);
    return report("reduced", "");
  }
  if (op->small) {
    op->spares = spares_;
    const uint64_t wanted = bytes * static_cast<uint64_t>(size_);
    if (!spares_->empty()) {
      op->copies = std::move(spares_->back());
      spares_->pop_back();
    }
    if (op->copies.size() < wanted) op->copies.resize(wanted);
    if (op->passage == nullptr) std::memcpy(op->copies.data() + bytes * static_cast<uint64_t>(me_), op->src, bytes);
    op->to_receive = static_cast<uint64_t>(size_ - 1);
  } else {
    for (int hop = 0; hop < hops(); ++hop) {
      op->to_receive += chunks(*op, received_segment(hop));
      // What is sent at a hop is what was received at the one before; the first is the own segment.
      op->to_acknowledge += chunks(*op, hop == 0 ? me_ : received_segment(hop - 1));
    }
  }
  op->to_place = op->to_receive;
  operations_[{step, bucket}] = op;
  if (op->passage != nullptr) {
    submit_on_device(op);
  } else if (op->small) {
    send_copy(op, 0, me_);
  } else {
    send_segment(op);
  }
  const bool now = inline_send || bytes <= kInlineBytes;
  out_->pump(now);
  // Sending may have found the peer gone.
  if (broken_.empty()) in_->places_changed(now);
}

void Ring::send_segment(const std::shared_ptr<Operation>& op) {
  const uint64_t n = chunks(*op, me_);
  for (uint64_t i = 0; i < n; ++i) send_chunk(op, 0, i, op->src, chunk(*op, me_, i));
}

void Ring::send_chunk(const std::shared_ptr<Operation>& op, int hop, uint64_t index, const std::byte* from, Chunk c) {
  OutMessage m;
  m.data = from + c.at * op->element;
  m.bytes = c.count * op->element;
  m.step = op->step;
  m.bucket = op->bucket;
  m.part = part(hop, index);
  m.keep = op;
  out_->send(std::move(m));
}

void Ring::send_copy(const std::shared_ptr<Operation>& op, int hop, int origin) {
  OutMessage m;
  m.bytes = op->count * op->element;
  m.data = op->copies.data() + m.bytes * static_cast<uint64_t>(origin);
  m.step = op->step;
  m.bucket = op->bucket;
  m.part = part(hop, 0);
  m.ack_soon = false;
  m.keep = op;
  out_->send(std::move(m));
}

Placement Ring::place(const FrameHeader& h) {
  const auto it = operations_.find({h.step, h.bucket});
  // A peer that is done may begin the same step and bucket anew: those messages are the next operation's.
  if (!active_ || it == operations_.end() || it->second->to_place == 0) return {Placement::Kind::later, nullptr, nullptr};
  Operation& op = *it->second;
  const int hop = static_cast<int>(h.part >> kChunkBits);
  const uint64_t index = h.part & kChunkMask;
  const uint64_t bytes = op.count * op.element;
  if (op.small && hop < size_ - 1 && index == 0 && h.total == bytes) {
    --op.to_place;
    return {Placement::Kind::here, op.copies.data() + bytes * static_cast<uint64_t>(wrap(me_ - 1 - hop)), nullptr};
  }
  if (!op.small && hop < hops() && index < chunks(op, received_segment(hop))) {
    const Chunk c = chunk(op, received_segment(hop), index);
    if (h.total == c.count * op.element) {
      if (op.passage != nullptr) return place_on_device(op, h);
      --op.to_place;
      return {Placement::Kind::here, op.dst + c.at * op.element, nullptr};
    }
  }
  break_down("bucket " + std::to_string(h.bucket) + " of step " + std::to_string(h.step) + " has another size at " +
             in_->peer() + " than here (" + std::to_string(op.count) +
             " elements): the bucket plans or chunk_bytes of the members differ");
  return {Placement::Kind::refused, nullptr, "a message of the wrong size"};
}

void Ring::received(const FrameHeader& h) {
  next_seq_ = h.seq + 1;
  const auto it = operations_.find({h.step, h.bucket});
  if (it == operations_.end()) return;
  const std::shared_ptr<Operation> op = it->second;
  const int hop = static_cast<int>(h.part >> kChunkBits);
  if (op->to_receive == 0) return;  // a peer that repeats itself; nothing may be added twice
  if (events_.breakpoint.armed) events_.breakpoint.passed(op->step, op->bucket);
  --op->to_receive;
  if (op->small) {
    if (hop + 1 < size_ - 1) send_copy(op, hop + 1, wrap(me_ - 1 - hop));
    if (op->to_receive == 0 && op->passage == nullptr) add_copies(*op, op->dst);
    if (op->to_receive == 0 && op->passage != nullptr && op->own_copy) add_copies_for_device(op);
  } else if (op->passage != nullptr) {
    received_on_device(op, h.part);
  } else {
    const uint64_t index = h.part & kChunkMask;
    const Chunk c = chunk(*op, received_segment(hop), index);
    const uint64_t at = c.at * op->element;
    if (hop < size_ - 1) sum_into(op->dst + at, op->src + at, c.count, op->dtype);
    if (hop + 1 < hops()) send_chunk(op, hop + 1, index, op->dst, c);
  }
  if (op->passage != nullptr) device_turn();
  out_->pump(true);
  maybe_done(*op);
}

void Ring::add_copies(Operation& op, std::byte* into) {
  const uint64_t bytes = op.count * op.element;
  for (int g = 0; g < size_; ++g) {
    const uint64_t begin = segment_begin(op, g);
    const uint64_t count = segment_begin(op, g + 1) - begin;
    const uint64_t at = begin * op.element;
    if (count == 0) continue;
    // The order in which the segment would have gone around. The copies are not written to: they may be sent again.
    for (int k = 0; k < size_; ++k) {
      const std::byte* copy = op.copies.data() + bytes * static_cast<uint64_t>(wrap(g + k)) + at;
      if (k == 0) {
        std::memcpy(into + at, copy, count * op.element);
      } else {
        sum_into(into + at, copy, count, op.dtype);
      }
    }
  }
}

void Ring::sent(const OutMessage& message) {
  auto& op = *static_cast<Operation*>(message.keep.get());
  if (op.small) return;
  --op.to_acknowledge;
  if (op.passage != nullptr && broken_.empty()) {
    op.passage->release(op.passage->slot_of(message.data));
    transport_.wake();  // the slot's next use, but not from inside of the link
  }
  maybe_done(op);
}

void Ring::maybe_done(Operation& op) {
  if (op.to_receive != 0 || op.to_acknowledge != 0 || op.to_settle != 0) return;
  const auto it = operations_.find({op.step, op.bucket});
  if (it == operations_.end() || it->second.get() != &op) return;
  Event e = event("reduced");
  e.step = op.step;
  e.bucket = op.bucket;
  operations_.erase(it);
  events_.emit(std::move(e));
}

// No operation can complete any more: buffers go back to their owner, the neighbours are told.
void Ring::break_down(const std::string& reason) {
  if (!broken_.empty()) return;
  broken_ = reason;
  if (out_) out_->close("its ring broke: " + reason, true);
  if (in_) in_->close("its ring broke: " + reason, true);
  if (passage_ != nullptr) passage_->reset();
  std::map<Key, std::shared_ptr<Operation>> lost;
  lost.swap(operations_);
  for (const auto& [key, op] : lost) {
    Event e = event("failed");
    e.step = key.first;
    e.bucket = key.second;
    e.reason = reason;
    events_.emit(std::move(e));
  }
}

void Ring::close(const std::string& reason, bool left_epoch) {
  if (broken_.empty()) broken_ = reason;
  if (out_) out_->close(reason, left_epoch);
  if (in_) in_->close(reason, left_epoch);
  if (passage_ != nullptr) passage_->reset();
  operations_.clear();
}

}  // namespace ftar
