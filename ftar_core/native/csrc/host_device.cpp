// The CPU as a device. See device.h.
#include <cstring>
#include <new>

#include "device.h"

namespace ftar {

namespace {

constexpr std::align_val_t kPage{4096};

void* at(uint64_t address) { return reinterpret_cast<void*>(address); }

class HostDevice final : public Device {
 public:
  const std::string& name() const override { return name_; }
  std::byte* pinned(size_t bytes) override { return static_cast<std::byte*>(::operator new(bytes, kPage)); }
  void free_pinned(std::byte* memory) override { ::operator delete(memory, kPage); }
  void bring(uint64_t to, const std::byte* from, size_t bytes) override { std::memcpy(at(to), from, bytes); }
  void copy(uint64_t to, uint64_t from, size_t bytes) override { std::memcpy(at(to), at(from), bytes); }
  void add(uint64_t into, uint64_t what, uint64_t count, DType dtype) override {
    const DefaultFloatMode mode;
    sum_into(at(into), at(what), count, dtype);
  }
  void fetch(std::byte* to, uint64_t from, size_t bytes) override { std::memcpy(to, at(from), bytes); }
  uint64_t mark(Way way) override { return ++marks_[way == Way::in ? 0 : 1]; }
  uint64_t reached(Way way) const override { return marks_[way == Way::in ? 0 : 1]; }
  void out_after(uint64_t) override {}
  bool failed() const override { return false; }
  std::string failure() const override { return ""; }
  int fd() const override { return -1; }
  void drain_fd() override {}
  void settle() override {}
  std::vector<Checked> check(const std::vector<Area>& areas) override {
    std::vector<Checked> out;
    for (const Area& a : areas) out.push_back(ftar::check(at(a.address), a.count, a.dtype, a.seed));
    return out;
  }

 private:
  const std::string name_ = "cpu";
  uint64_t marks_[2] = {};
};

}  // namespace

std::shared_ptr<Device> make_host_device() { return std::make_shared<HostDevice>(); }

}  // namespace ftar
