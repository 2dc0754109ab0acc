// Between a device and the wire: a bounded block of pinned host memory, cut into slots of one chunk each, and what is to
// happen when the device has done something. By the transport's lock, like the ring that uses it.
//
// A chunk that comes in is received into a slot, goes to the device from there, and the slot is free. A chunk that goes
// out is fetched into a slot, and the slot is free when the next member has it. Slots are only for passing through: the
// working buffer is on the device, and whole. That is why a few of them are enough and why they cannot deadlock: taking
// something in never waits for sending, since a share of the slots is kept for what comes in, and the last of these for
// the message that must be next (`urgent`), or messages of another rail that are ahead of it would hold them all.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "device.h"

namespace ftar {

class Passage {
 public:
  static constexpr size_t kMaxBytes = size_t{64} << 20;
  static constexpr size_t kMaxSlots = 128;  // more would not make a bus or a wire any busier
  static constexpr size_t kMinSlots = 4;

  // most_slots: at least kMinSlots. Throws DeviceError.
  Passage(std::shared_ptr<Device> device, size_t slot_bytes, size_t most_slots);
  ~Passage();
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  Device& device() { return *device_; }
  void abandon() { block_ = nullptr; }  // in a child of fork: the driver does not work there

  int take_for_receiving(bool urgent);  // -1: none is free
  void release(int slot);
  void hold(int slot) { ++uses_[at(slot)]; }  // one release more is needed
  bool keep_for_sending(int slot);            // a slot that was received into may stay until it is sent; false: too many do
  std::byte* memory(int slot) { return block_ + at(slot) * slot_bytes_; }
  int slot_of(const std::byte* memory) const { return static_cast<int>(static_cast<size_t>(memory - block_) / slot_bytes_); }

  // `job` is given a slot to send from, as soon as one is free; in order.
  void when_sendable(std::function<void(int slot)> job) { jobs_.push_back(std::move(job)); }
  // `then` happens when all that was asked of the device on this way so far is done. Returns the mark.
  uint64_t after(Device::Way way, std::function<void()> then);
  // Runs what can be run now. True: a slot was freed since somebody could not have one.
  bool progress();
  // Nothing of all this is wanted any more. Returns when the device does nothing here any more.
  void reset();

 private:
  struct Waiting {
    uint64_t mark;
    std::function<void()> then;
  };
  static size_t at(int slot) { return static_cast<size_t>(slot); }

  std::shared_ptr<Device> device_;
  const size_t slot_bytes_;
  const int slots_;
  const int most_sending_;
  std::byte* block_ = nullptr;
  std::vector<int> free_;
  std::vector<int> uses_;
  std::vector<bool> sends_;
  int sending_ = 0;
  bool refused_ = false;  // since nothing was freed
  bool freed_ = false;
  std::deque<std::function<void(int)>> jobs_;
  std::deque<Waiting> waiting_[2];
  bool running_ = false;
};

}  // namespace ftar
