// Memory that is not the host's, as the ring sees it: copies and additions that are asked for now and made later.
//
// Work goes one of two ways, each a queue in order: `in` (to the device, and additions and copies there) and `out` (from
// the device). A bus carries both directions at once, so one queue for both would halve what it carries. What must come
// behind something of the other way says so (`out_after`). Nothing here waits, but `settle` and `check`.
//
// How one learns that work is done: a mark is put behind it, and `reached` says how far a way has come; `fd` is readable
// when that has changed. On CUDA a thread a way sleeps in the driver on the mark's event (a blocking one: an interrupt
// wakes it) and writes an eventfd. Rejected: a host function in the stream (cuLaunchHostFunc), which holds the stream up
// for as long as it runs, and is never called once the context has failed, which is when word is needed most; polling
// events in the I/O thread, which costs a core or milliseconds.
//
// A failure is for good: what is asked for afterwards is not done, and `failure` names the call and the driver's error.
// Work on a device never waits for the network or for the training's kernels (a bucket is given to the ring once it is
// complete there), so what is under way is over in milliseconds, and `settle` may wait for it. A device that does not
// come back within its bound, be it work or a call of the driver, ends the process with a line that says so: buffers it
// may still write can be given back to nobody, and threads that sit in the driver cannot be ended.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "digest.h"
#include "reduce.h"

namespace ftar {

class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Device {
 public:
  enum class Way { in, out };
  struct Area {  // what `check` reads
    uint64_t address;
    uint64_t count;  // elements
    DType dtype;
    uint64_t seed;
  };

  virtual ~Device() = default;
  virtual const std::string& name() const = 0;
  virtual std::byte* pinned(size_t bytes) = 0;  // host memory that the device reads and writes; throws DeviceError
  virtual void free_pinned(std::byte* memory) = 0;

  virtual void bring(uint64_t to, const std::byte* from, size_t bytes) = 0;           // in
  virtual void copy(uint64_t to, uint64_t from, size_t bytes) = 0;                    // in; both on the device
  virtual void add(uint64_t into, uint64_t what, uint64_t count, DType dtype) = 0;    // in; as sum_into
  virtual void fetch(std::byte* to, uint64_t from, size_t bytes) = 0;                 // out
  virtual uint64_t mark(Way way) = 0;               // behind all that was asked for on this way so far
  virtual uint64_t reached(Way way) const = 0;      // all marks up to this one
  virtual void out_after(uint64_t in_mark) = 0;     // what is asked for on `out` from here on begins after that mark
  virtual bool failed() const = 0;                  // told before a mark is reached whose work was not done
  virtual std::string failure() const = 0;          // empty: none
  virtual int fd() const = 0;                       // -1: all is done when it is asked for
  virtual void drain_fd() = 0;
  virtual void settle() = 0;  // returns when nothing is under way any more

  // Digest and finiteness of memory on the device, the same as `ftar::check` of a copy. Waits for it. Throws DeviceError.
  virtual std::vector<Checked> check(const std::vector<Area>& areas) = 0;
};

// The CPU as a device: its memory is the host's, and everything is done at once. For tests of the ring's control code.
std::shared_ptr<Device> make_host_device();

// GPU `ordinal` as the driver counts (CUDA_VISIBLE_DEVICES applies), in the primary context, which is torch's. `library`:
// the driver, libcuda.so.1. `timeout_ms`: what is asked of it is done by then, or the process ends. Throws DeviceError
// with the reason: no driver, a driver that lacks a function, no such device, no memory.
std::shared_ptr<Device> make_cuda_device(int ordinal, const std::string& library, int timeout_ms);

}  // namespace ftar
