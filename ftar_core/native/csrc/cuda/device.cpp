// A GPU, by the CUDA driver. See device.h.
//
// Three streams: in, out, and one for `check`, whose digests are the training thread's affair. They are in the primary
// context, which is torch's, so that torch's addresses mean the same here; they do not wait for the default stream.
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>

#include "../device.h"
#include "../forks.h"
#include "../transport.h"
#include "driver.h"
#include "kernels_ptx.h"
#include "way.h"

namespace ftar {

namespace {

using namespace cuda;

constexpr const char* kAdds[kDTypes] = {"ftar_add_f32",  "ftar_add_f64", "ftar_add_bf16",
                                        "ftar_add_f16", "ftar_add_u32", "ftar_add_u64"};
constexpr unsigned kThreads = 256;
constexpr unsigned kMaxBlocks = 64;  // few: a bus feeds them, and the training wants the rest
constexpr size_t kLanes = kDigestLanes;
constexpr size_t kAreas = 256;  // of one launch of `check`
constexpr int kHungExit = 75;   // RankExit.RESTART: start again, elsewhere or here

struct DeviceArea {  // kernels.cu
  uint64_t address, bytes, seed, low, high, half;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, const std::string& library, int timeout_ms)
      : driver_(load_driver(library)), timeout_ms_(timeout_ms), name_("cuda:" + std::to_string(ordinal)) {
    must("cuInit", driver_.init(0));
    int count = 0;
    must("cuDeviceGetCount", driver_.device_count(&count));
    if (ordinal < 0 || ordinal >= count) {
      throw DeviceError("there is no " + name_ + ": the CUDA driver shows " + std::to_string(count) +
                        " (CUDA_VISIBLE_DEVICES applies)");
    }
    must("cuDeviceGet", driver_.device_get(&id_, ordinal));
    char text[128] = {};
    if (driver_.device_name(text, sizeof text - 1, id_) == kSuccess && text[0] != 0) name_ += " (" + std::string(text) + ")";
    must("cuDevicePrimaryCtxRetain", driver_.context_retain(&context_, id_));
    try {
      open();
    } catch (...) {
      close();
      throw;
    }
    watch_ = std::thread([this] { watch(); });
    ::pthread_setname_np(watch_.native_handle(), "ftar-gpu-watch");
  }

  ~CudaDevice() override {
    if (fork_generation() != generation_) {  // none of its threads is here, and the driver does not work
      for (auto* way : {&in_, &out_, &look_}) {
        if (*way) (*way)->abandon(), static_cast<void>(way->release());
      }
      if (watch_.joinable()) ftar::abandon(watch_);
      return;
    }
    close();
  }

  const std::string& name() const override { return name_; }

  std::byte* pinned(size_t bytes) override {
    const Current current(driver_, context_);
    void* memory = nullptr;
    must("cuMemHostAlloc", driver_.host_alloc(&memory, bytes, kHostPortable | kHostDeviceMap));
    return static_cast<std::byte*>(memory);
  }
  void free_pinned(std::byte* memory) override {
    if (fork_generation() != generation_) return;
    const Current current(driver_, context_);
    static_cast<void>(driver_.host_free(memory));
  }

  void bring(uint64_t to, const std::byte* from, size_t bytes) override {
    call("cuMemcpyHtoDAsync", [&] { return driver_.to_device(to, from, bytes, in_->stream()); });
  }
  void copy(uint64_t to, uint64_t from, size_t bytes) override {
    call("cuMemcpyDtoDAsync", [&] { return driver_.on_device(to, from, bytes, in_->stream()); });
  }
  void add(uint64_t into, uint64_t what, uint64_t count, DType dtype) override {
    if (count == 0) return;
    void* parameters[] = {&into, &what, &count};
    const auto blocks = static_cast<unsigned>(std::min<uint64_t>((count + kThreads - 1) / kThreads, kMaxBlocks));
    call("cuLaunchKernel", [&] {
      return driver_.launch(adds_[static_cast<int>(dtype)], blocks, 1, 1, kThreads, 1, 1, 0, in_->stream(), parameters, nullptr);
    });
  }
  void fetch(std::byte* to, uint64_t from, size_t bytes) override {
    call("cuMemcpyDtoHAsync", [&] { return driver_.to_host(to, from, bytes, out_->stream()); });
  }
  uint64_t mark(Way way) override {
    const InCall in_call(*this);
    const Current current(driver_, context_);
    return (way == Way::in ? in_ : out_)->mark();
  }
  uint64_t reached(Way way) const override { return (way == Way::in ? in_ : out_)->reached(); }
  void out_after(uint64_t in_mark) override {
    call("cuStreamWaitEvent", [&] { return in_->let_wait(out_->stream(), in_mark); });
  }

  bool failed() const override { return failed_.load(std::memory_order_acquire); }
  std::string failure() const override {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  int fd() const override { return fd_; }
  void drain_fd() override {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t n = ::read(fd_, &count, sizeof count);
  }
  void settle() override {
    in_->settle();
    out_->settle();
  }
  std::vector<Checked> check(const std::vector<Area>& areas) override;

 private:
  struct InCall {  // for the watch: a call of the driver that does not return
    explicit InCall(CudaDevice& d) : device(d) {
      const std::lock_guard lock(device.calls_mutex_);
      at = device.calls_.insert(Transport::now_ms());
    }
    ~InCall() {
      const std::lock_guard lock(device.calls_mutex_);
      device.calls_.erase(at);
    }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;
    CudaDevice& device;
    std::multiset<double>::iterator at;
  };

  void must(const char* what, Result result) const {
    if (result != kSuccess) throw DeviceError(name_ + ": " + what + ": " + driver_.describe(result));
  }
  template <typename F>
  void call(const char* what, F f) {
    if (failed()) return;
    const InCall in_call(*this);
    const Current current(driver_, context_);
    if (const Result r = f(); r != kSuccess) fail(what, r);
  }
  void fail(const char* what, Result result) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = name_ + ": " + what + ": " + driver_.describe(result);
      failed_.store(true, std::memory_order_release);
    }
    tell();
  }
  void tell() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(fd_, &one, sizeof one);
  }
  std::unique_ptr<StreamWay> way(const char* name) {
    auto made = std::make_unique<StreamWay>(
        driver_, context_, name, [this](const char* what, Result r) { fail(what, r); }, [this] { tell(); });
    made->open();
    return made;
  }
  void open() {
    fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd_ < 0) throw DeviceError("eventfd: " + std::string(std::strerror(errno)));
    const Current current(driver_, context_);
    must("cuModuleLoadData", driver_.module_load(&module_, kKernelsPtx));
    for (int i = 0; i < kDTypes; ++i) must("cuModuleGetFunction", driver_.module_function(&adds_[i], module_, kAdds[i]));
    must("cuModuleGetFunction", driver_.module_function(&check_, module_, "ftar_check"));
    look_block_ = pinned(kAreas * (sizeof(DeviceArea) + 2 * kLanes * sizeof(uint32_t)));
    in_ = way("ftar-gpu-in");
    out_ = way("ftar-gpu-out");
    look_ = way("ftar-gpu-look");
  }
  void close() {
    for (auto* way : {&in_, &out_, &look_}) {
      if (*way) (*way)->settle();
    }
    {
      const std::lock_guard lock(watch_mutex_);
      ends_ = true;
    }
    watch_changed_.notify_all();
    if (watch_.joinable()) watch_.join();
    {
      const Current current(driver_, context_);
      for (auto* way : {&in_, &out_, &look_}) way->reset();
      if (look_block_ != nullptr) static_cast<void>(driver_.host_free(look_block_));
      if (module_ != nullptr) static_cast<void>(driver_.module_unload(module_));
    }
    static_cast<void>(driver_.context_release(id_));
    if (fd_ >= 0) ::close(fd_);
  }
  void watch();

  const Driver& driver_;
  const int timeout_ms_;
  const uint32_t generation_ = fork_generation();
  std::string name_;
  DeviceId id_ = 0;
  Context context_ = nullptr;
  Module module_ = nullptr;
  Function adds_[kDTypes] = {};
  Function check_ = nullptr;
  int fd_ = -1;
  mutable std::mutex mutex_;
  std::string failure_;
  std::atomic<bool> failed_{false};
  std::unique_ptr<StreamWay> in_, out_, look_;
  std::mutex look_mutex_;
  std::byte* look_block_ = nullptr;
  std::mutex calls_mutex_;
  std::multiset<double> calls_;  // since when each call of the driver runs
  std::mutex watch_mutex_;
  std::condition_variable watch_changed_;
  bool ends_ = false;
  std::thread watch_;
};

std::vector<Checked> CudaDevice::check(const std::vector<Area>& areas) {
  const std::lock_guard lock(look_mutex_);
  std::vector<Checked> out;
  auto* asked = reinterpret_cast<DeviceArea*>(look_block_);
  auto* lanes = reinterpret_cast<uint32_t*>(look_block_ + kAreas * sizeof(DeviceArea));
  for (size_t begin = 0; begin < areas.size(); begin += kAreas) {
    const size_t n = std::min(kAreas, areas.size() - begin);
    for (size_t i = 0; i < n; ++i) {
      const Area& a = areas[begin + i];
      const Exponent e = exponent_of(a.dtype);
      asked[i] = {a.address, a.count * element_bytes(a.dtype), a.seed, e.bits & 0xffffffffu, e.bits >> 32,
                  e.width == 2 ? 1u : 0u};
    }
    uint64_t from = reinterpret_cast<uint64_t>(asked);
    uint64_t to = reinterpret_cast<uint64_t>(lanes);
    void* parameters[] = {&from, &to};
    call("cuLaunchKernel", [&] {
      return driver_.launch(check_, static_cast<unsigned>(n), 1, 1, kLanes, 1, 1, 0, look_->stream(), parameters, nullptr);
    });
    {
      const InCall in_call(*this);
      const Current current(driver_, context_);
      look_->mark();
    }
    look_->settle();
    if (failed()) throw DeviceError(failure());
    for (size_t i = 0; i < n; ++i) {
      const uint32_t* found = lanes + i * 2 * kLanes;
      const bool bad = std::any_of(found + kLanes, found + 2 * kLanes, [](uint32_t b) { return b != 0; });
      out.push_back({digest_of_lanes(found, asked[i].bytes, asked[i].seed), !bad});
    }
  }
  return out;
}

void CudaDevice::watch() {
  std::unique_lock lock(watch_mutex_);
  const auto pause = std::chrono::milliseconds(std::clamp(timeout_ms_ / 8, 5, 1000));
  while (!watch_changed_.wait_for(lock, pause, [this] { return ends_; })) {
    const double before = Transport::now_ms() - timeout_ms_;
    const char* what = nullptr;
    for (const StreamWay* way : {in_.get(), out_.get(), look_.get()}) {
      if (const double since = way->oldest_ms(); since >= 0 && since < before) what = "has not finished a copy or a kernel";
    }
    {
      const std::lock_guard calls(calls_mutex_);
      if (!calls_.empty() && *calls_.begin() < before) what = "has not answered a call of the driver";
    }
    if (what == nullptr) continue;
    const std::string line = "ftar: " + name_ + " " + what + " for " + std::to_string(timeout_ms_ / 1000.0) +
                             " s: it hangs, so this process ends (exit code " + std::to_string(kHungExit) + ")\n";
    [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
    ::_exit(kHungExit);
  }
}

}  // namespace

std::shared_ptr<Device> make_cuda_device(int ordinal, const std::string& library, int timeout_ms) {
  watch_forks();
  return std::make_shared<CudaDevice>(ordinal, library, timeout_ms);
}

}  // namespace ftar
