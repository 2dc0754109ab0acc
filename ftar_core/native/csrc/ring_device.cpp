// The ring's operations whose memory is on a device. See ring.h, passage.h, device.h.
//
// A chunk that comes in: received into a slot; device: dst = slot, and on the way round for the sum dst += src; done with
// the slot. A chunk that goes out: device: slot = src (the first hop) or dst; sent; done with the slot when the next
// member has it. If sending may have the slot that a chunk came in, it stays there: a final sum is sent on as it came,
// while the device takes it, and a partial sum is fetched into the slot that it was brought from.
//
// What the host does itself: the small way. Copies of at most kSmallBytesOfTwo are fetched, added up here and brought
// back: less than what starting work on a device for each copy would cost.
#include <cstring>
#include <utility>

#include "ring.h"

namespace ftar {

namespace {
uint64_t address(const std::byte* memory) { return reinterpret_cast<uint64_t>(memory); }
}  // namespace

void Ring::submit_on_device(const std::shared_ptr<Operation>& op) {
  Passage& passage = *op->passage;
  passage_ = &passage;
  const uint64_t bytes = op->count * op->element;
  if (size_ == 1) {
    operations_[{op->step, op->bucket}] = op;
    ++op->to_settle;
    passage.device().copy(address(op->dst), address(op->src), bytes);
    passage.after(Device::Way::in, [this, op] { settled(*op, -1); });
  } else if (op->small) {
    op->own_copy = false;
    ++op->to_settle;
    passage.when_sendable([this, op, bytes](int slot) {
      Passage& p = *op->passage;
      p.device().fetch(p.memory(slot), address(op->src), bytes);
      p.after(Device::Way::out, [this, op, bytes, slot] {
        std::memcpy(op->copies.data() + bytes * static_cast<uint64_t>(me_), op->passage->memory(slot), bytes);
        op->passage->release(slot);
        op->own_copy = true;
        send_copy(op, 0, me_);
        to_pump_ = true;
        if (op->to_receive == 0) add_copies_for_device(op);
      });
    });
  } else {
    const uint64_t n = chunks(*op, me_);
    for (uint64_t i = 0; i < n; ++i) {
      passage.when_sendable([this, op, i](int slot) { fetch_chunk(op, 0, i, chunk(*op, me_, i), slot, op->src, 0); });
    }
  }
  device_turn();
}

Placement Ring::place_on_device(Operation& op, const FrameHeader& h) {
  if (op.slots.contains(h.part)) {
    break_down(in_->peer() + " sent a part of bucket " + std::to_string(h.bucket) + " twice");
    return {Placement::Kind::refused, nullptr, "a message that came already"};
  }
  const int slot = op.passage->take_for_receiving(h.seq == next_seq_);
  if (slot < 0) return {Placement::Kind::later, nullptr, nullptr};
  --op.to_place;
  op.slots[h.part] = slot;
  return {Placement::Kind::here, op.passage->memory(slot), nullptr};
}

void Ring::received_on_device(const std::shared_ptr<Operation>& op, uint32_t message_part) {
  const auto found = op->slots.find(message_part);
  if (found == op->slots.end()) return;
  const int slot = found->second;
  op->slots.erase(found);
  Passage& passage = *op->passage;
  Device& device = passage.device();
  const int hop = static_cast<int>(message_part >> kChunkBits);
  const uint64_t index = message_part & kChunkMask;
  const Chunk c = chunk(*op, received_segment(hop), index);
  const uint64_t at = c.at * op->element;
  const bool sums = hop < size_ - 1;
  const bool forwards = hop + 1 < hops();
  device.bring(address(op->dst + at), passage.memory(slot), c.count * op->element);
  if (sums) device.add(address(op->dst + at), address(op->src + at), c.count, op->dtype);
  const bool stays = forwards && passage.keep_for_sending(slot);
  if (stays) passage.hold(slot);
  ++op->to_settle;
  const uint64_t mark = passage.after(Device::Way::in, [this, op, slot] { settled(*op, slot); });
  if (stays && !sums) {
    send_slot(op, hop + 1, index, c, slot);
  } else if (stays) {
    fetch_chunk(op, hop + 1, index, c, slot, op->dst, mark);
  } else if (forwards) {
    passage.when_sendable([=, this](int other) { fetch_chunk(op, hop + 1, index, c, other, op->dst, mark); });
  }
}

// `behind`: a mark of the way in.
void Ring::fetch_chunk(const std::shared_ptr<Operation>& op, int hop, uint64_t index, Chunk c, int slot,
                       const std::byte* from, uint64_t behind) {
  Passage& passage = *op->passage;
  if (behind > 0) passage.device().out_after(behind);
  passage.device().fetch(passage.memory(slot), address(from + c.at * op->element), c.count * op->element);
  passage.after(Device::Way::out, [=, this] { send_slot(op, hop, index, c, slot); });
}

void Ring::send_slot(const std::shared_ptr<Operation>& op, int hop, uint64_t index, Chunk c, int slot) {
  OutMessage m;
  m.data = op->passage->memory(slot);
  m.bytes = c.count * op->element;
  m.step = op->step;
  m.bucket = op->bucket;
  m.part = part(hop, index);
  m.keep = op;
  out_->send(std::move(m));
  to_pump_ = true;
}

void Ring::add_copies_for_device(const std::shared_ptr<Operation>& op) {
  op->passage->when_sendable([this, op](int slot) {
    Passage& passage = *op->passage;
    {
      const DefaultFloatMode mode;  // perhaps in a thread of the caller's
      add_copies(*op, passage.memory(slot));
    }
    passage.device().bring(address(op->dst), passage.memory(slot), op->count * op->element);
    passage.after(Device::Way::in, [this, op, slot] { settled(*op, slot); });
  });
}

void Ring::settled(Operation& op, int slot) {
  if (slot >= 0) op.passage->release(slot);
  --op.to_settle;
  maybe_done(op);
}

void Ring::device_turn() {
  if (passage_ == nullptr || !broken_.empty()) return;
  if (passage_->progress()) {
    room_ = true;
    transport_.wake();
  }
  if (passage_->device().failed()) return break_down(passage_->device().failure());
  if (std::exchange(to_pump_, false) && out_) out_->pump(true);
}

void Ring::device_news() {
  device_turn();
  if (!broken_.empty() || !std::exchange(room_, false)) return;
  in_->places_changed(true);
  device_turn();
}

}  // namespace ftar
