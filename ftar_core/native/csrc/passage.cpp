// See passage.h.
#include "passage.h"

#include <algorithm>
#include <utility>

namespace ftar {

Passage::Passage(std::shared_ptr<Device> device, size_t slot_bytes, size_t most_slots)
    : device_(std::move(device)),
      slot_bytes_(slot_bytes),
      slots_(static_cast<int>(std::clamp(kMaxBytes / slot_bytes, kMinSlots, most_slots))),
      most_sending_(slots_ / 2) {
  block_ = device_->pinned(slot_bytes_ * static_cast<size_t>(slots_));
  uses_.resize(at(slots_));
  sends_.resize(at(slots_));
  for (int slot = slots_ - 1; slot >= 0; --slot) free_.push_back(slot);
}

Passage::~Passage() {
  if (block_ != nullptr) device_->free_pinned(block_);
}

int Passage::take_for_receiving(bool urgent) {
  // What is free is never all that sending may have: of the other half one is left for what is urgent.
  const int receiving = slots_ - static_cast<int>(free_.size()) - sending_;
  const int most = slots_ - most_sending_ - (urgent ? 0 : 1);
  if (free_.empty() || receiving >= most) {
    refused_ = true;
    freed_ = false;
    return -1;
  }
  const int slot = free_.back();
  free_.pop_back();
  uses_[at(slot)] = 1;
  return slot;
}

bool Passage::keep_for_sending(int slot) {
  // Those that wait for a slot came before.
  if (sends_[at(slot)] || sending_ >= most_sending_ || !jobs_.empty()) return false;
  sends_[at(slot)] = true;
  ++sending_;
  freed_ = true;  // for what comes in
  return true;
}

void Passage::release(int slot) {
  if (uses_[at(slot)] == 0 || --uses_[at(slot)] > 0) return;
  if (sends_[at(slot)]) --sending_;
  sends_[at(slot)] = false;
  free_.push_back(slot);
  freed_ = true;
}

uint64_t Passage::after(Device::Way way, std::function<void()> then) {
  const uint64_t mark = device_->mark(way);
  waiting_[way == Device::Way::in ? 0 : 1].push_back({mark, std::move(then)});
  return mark;
}

bool Passage::progress() {
  if (running_) return false;  // from within what is run here
  running_ = true;
  for (bool more = true; more;) {
    more = false;
    for (const Device::Way way : {Device::Way::in, Device::Way::out}) {
      std::deque<Waiting>& waiting = waiting_[way == Device::Way::in ? 0 : 1];
      const uint64_t reached = device_->reached(way);  // before `failed`: what a failure ended was not done
      while (!waiting.empty() && !device_->failed() && waiting.front().mark <= reached) {
        const std::function<void()> then = std::move(waiting.front().then);
        waiting.pop_front();
        then();
        more = true;
      }
    }
    while (!device_->failed() && !jobs_.empty() && !free_.empty() && sending_ < most_sending_) {
      const std::function<void(int)> job = std::move(jobs_.front());
      jobs_.pop_front();
      const int slot = free_.back();
      free_.pop_back();
      uses_[at(slot)] = 1;
      sends_[at(slot)] = true;
      ++sending_;
      job(slot);
      more = true;
    }
  }
  running_ = false;
  if (!refused_ || !freed_) return false;
  refused_ = freed_ = false;
  return true;
}

void Passage::reset() {
  for (std::deque<Waiting>& waiting : waiting_) waiting.clear();
  jobs_.clear();
  device_->settle();
  free_.clear();
  for (int slot = slots_ - 1; slot >= 0; --slot) free_.push_back(slot);
  std::fill(uses_.begin(), uses_.end(), 0);
  std::fill(sends_.begin(), sends_.end(), false);
  sending_ = 0;
  refused_ = freed_ = false;
}

}  // namespace ftar
