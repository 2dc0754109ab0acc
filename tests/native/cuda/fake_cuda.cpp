// A CUDA driver without a GPU: the functions that ftar_core calls, for tests of the real binding (csrc/cuda).
//
// What is like a GPU: work is late and in order per stream (a thread each, with delays from a seed); an event is where it
// was recorded; the device's memory cannot be read or written by the host at its address (no access, so that a mistake is
// a crash): the fake has a second view of it; copies are only taken to and from pinned memory, and only within blocks that
// were allocated; a kernel is found by name and is the real source, compiled for the CPU (kernels.cu); every call wants the
// context current in its thread; an error of asynchronous work is told by the calls that come after, and for good.
//
// fake_* are for the test: allocate, look, break.
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace kernels {
struct Dim {
  unsigned x;
};
thread_local Dim blockIdx, threadIdx, blockDim, gridDim;
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline double __longlong_as_double(long long v) { return std::bit_cast<double>(v); }
#define __global__
#define __device__
#define __forceinline__ inline
#include "kernels.cu"
}  // namespace kernels

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100, kInvalidDevice = 101,
              kInvalidImage = 200, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kIllegalAddress = 700,
              kLaunchFailed = 719;
constexpr size_t kMemory = size_t{1} << 28;

struct Event {  // what one record of it stands for
  bool come = false;
};
struct Handle {
  std::shared_ptr<Event> recorded;
};

struct Stream {
  explicit Stream(unsigned seed) : random(seed) {}
  std::deque<std::function<void()>> tasks;
  std::mt19937 random;
  bool ends = false;
  std::thread thread;
};

struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  char* there = nullptr;  // the device's address: no access
  char* view = nullptr;   // the same memory
  std::map<uint64_t, size_t> blocks;
  std::map<uint64_t, size_t> pinned;
  uint64_t used = 0;
  int devices = 1;
  bool initialized = false;
  long pinned_limit = 1l << 40;
  unsigned seed = 1;
  long delay_us = 0;
  unsigned streams = 0;
  int error = 0;  // sticky
  long tasks = 0, fail_task = -1, hang_task = -1;
  int fail_with = kIllegalAddress;
  std::string fail_call;
  long fail_nth = 0;
  int fail_call_with = 0;
  std::string hang_call;
  std::map<std::string, long> calls;
  long copied = 0;
};

Fake& fake() {
  static Fake* f = new Fake;  // outlives the threads of others
  return *f;
}

thread_local int current = 0;

bool inside(const std::map<uint64_t, size_t>& blocks, uint64_t address, size_t bytes) {
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return false;
  --it;
  return address >= it->first && address + bytes <= it->first + it->second;
}

void* seen(uint64_t address) {
  Fake& f = fake();
  const auto base = reinterpret_cast<uint64_t>(f.there);
  if (address >= base && address < base + kMemory) return f.view + (address - base);
  return reinterpret_cast<void*>(address);  // pinned
}

// Of every call. 0, or what it returns at once.
int enter(const char* name, bool wants_context = true) {
  Fake& f = fake();
  std::unique_lock lock(f.mutex);
  ++f.calls[name];
  if (f.hang_call == name) f.changed.wait(lock, [&] { return f.hang_call != name; });
  if (f.fail_call == name && --f.fail_nth == 0) return f.fail_call_with;
  if (!f.initialized) return kNotInitialized;
  if (wants_context && current == 0) return kInvalidContext;
  return f.error;
}

void run(Stream* s) {
  Fake& f = fake();
  std::unique_lock lock(f.mutex);
  for (;;) {
    f.changed.wait(lock, [&] { return s->ends || !s->tasks.empty(); });
    if (s->tasks.empty()) return;
    const std::function<void()> task = std::move(s->tasks.front());
    s->tasks.pop_front();
    const long wait = f.delay_us > 0 ? static_cast<long>(s->random() % static_cast<unsigned long>(f.delay_us + 1)) : 0;
    lock.unlock();
    if (wait > 0) ::usleep(static_cast<useconds_t>(wait));
    task();
    lock.lock();
    f.changed.notify_all();
  }
}

int put(Stream* s, std::function<void()> task) {
  Fake& f = fake();
  if (s == nullptr) return kInvalidHandle;
  const std::lock_guard lock(f.mutex);
  s->tasks.push_back(std::move(task));
  f.changed.notify_all();
  return 0;
}

// Work that may fail or hang. After a failure nothing is done any more.
int work(Stream* s, std::function<void()> what) {
  return put(s, [what = std::move(what)] {
    Fake& f = fake();
    {
      std::unique_lock lock(f.mutex);
      const long number = f.tasks++;
      if (number == f.hang_task) f.changed.wait(lock, [&] { return f.hang_task != number; });
      if (number == f.fail_task) f.error = f.fail_with;
      if (f.error != 0) return;
    }
    what();
  });
}

int copy(Stream* s, uint64_t to, uint64_t from, size_t bytes, bool to_device, bool from_device) {
  Fake& f = fake();
  {
    const std::lock_guard lock(f.mutex);
    if (!inside(to_device ? f.blocks : f.pinned, to, bytes) || !inside(from_device ? f.blocks : f.pinned, from, bytes)) {
      return kInvalidValue;
    }
    f.copied += static_cast<long>(bytes);
  }
  return work(s, [=] { std::memcpy(seen(to), seen(from), bytes); });
}

using Kernel = std::function<void(void**)>;
struct Launched {
  const char* name;
  unsigned element;  // of an addition; 0: another kernel
};
Launched table[] = {{"ftar_add_f32", 4}, {"ftar_add_f64", 8}, {"ftar_add_bf16", 2}, {"ftar_add_f16", 2},
                    {"ftar_add_u32", 4}, {"ftar_add_u64", 8}, {"ftar_check", 0}};

template <typename F>
void grid(unsigned blocks, unsigned threads, F kernel) {
  using namespace kernels;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
  }
}

void add(const std::string& name, void* into, const void* what, uint64_t n, unsigned blocks, unsigned threads) {
  using namespace kernels;
  grid(blocks, threads, [&] {
    if (name == "ftar_add_f32") ftar_add_f32(static_cast<float*>(into), static_cast<const float*>(what), n);
    if (name == "ftar_add_f64") ftar_add_f64(static_cast<double*>(into), static_cast<const double*>(what), n);
    if (name == "ftar_add_bf16") ftar_add_bf16(static_cast<u16*>(into), static_cast<const u16*>(what), n);
    if (name == "ftar_add_f16") ftar_add_f16(static_cast<u16*>(into), static_cast<const u16*>(what), n);
    if (name == "ftar_add_u32") ftar_add_u32(static_cast<u32*>(into), static_cast<const u32*>(what), n);
    if (name == "ftar_add_u64") ftar_add_u64(static_cast<u64*>(into), static_cast<const u64*>(what), n);
  });
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
  Fake& f = fake();
  {
    const std::lock_guard lock(f.mutex);
    if (f.devices == 0) return kNoDevice;
    if (f.there == nullptr) {
      const int fd = ::memfd_create("fake-gpu", MFD_CLOEXEC);
      if (fd < 0 || ::ftruncate(fd, kMemory) != 0) return kOutOfMemory;
      f.there = static_cast<char*>(::mmap(nullptr, kMemory, PROT_NONE, MAP_SHARED, fd, 0));
      f.view = static_cast<char*>(::mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
      ::close(fd);
    }
    f.initialized = true;
  }
  return enter("cuInit", false);
}
int cuDeviceGetCount(int* count) {
  *count = fake().devices;
  return enter("cuDeviceGetCount", false);
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < fake().devices ? enter("cuDeviceGet", false) : kInvalidDevice;
}
int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  return enter("cuDeviceGetName", false);
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &fake();
  return enter("cuDevicePrimaryCtxRetain", false);
}
int cuDevicePrimaryCtxRelease_v2(int) { return enter("cuDevicePrimaryCtxRelease", false); }
int cuCtxPushCurrent_v2(void*) {
  ++current;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = &fake();
  --current;
  return 0;
}
int cuStreamCreate(Stream** stream, unsigned flags) {
  if (const int r = enter("cuStreamCreate")) return r;
  if (flags != 1) return kInvalidValue;  // one that waits for the default stream would wait for the training
  Fake& f = fake();
  auto* s = new Stream(f.seed + 1000 * f.streams++);
  s->thread = std::thread([s] { run(s); });
  *stream = s;
  return 0;
}
int cuStreamDestroy_v2(Stream* s) {
  Fake& f = fake();
  {
    const std::lock_guard lock(f.mutex);
    s->ends = true;
    f.changed.notify_all();
  }
  s->thread.join();
  delete s;
  return enter("cuStreamDestroy");
}
int cuStreamWaitEvent(Stream* s, Handle* event, unsigned) {
  if (const int r = enter("cuStreamWaitEvent")) return r;
  const std::shared_ptr<Event> e = event->recorded;
  if (!e) return 0;
  return put(s, [e] {
    Fake& f = fake();
    std::unique_lock lock(f.mutex);
    f.changed.wait(lock, [&] { return e->come; });
  });
}
int cuEventCreate(Handle** event, unsigned flags) {
  if (const int r = enter("cuEventCreate")) return r;
  if (flags != 3) return kInvalidValue;  // who waits for it would burn a core
  *event = new Handle;
  return 0;
}
int cuEventRecord(Handle* event, Stream* s) {
  if (const int r = enter("cuEventRecord")) return r;
  auto e = std::make_shared<Event>();
  event->recorded = e;
  return put(s, [e] {
    const std::lock_guard lock(fake().mutex);
    e->come = true;
  });
}
int cuEventSynchronize(Handle* event) {
  if (const int r = enter("cuEventSynchronize")) return r;
  Fake& f = fake();
  std::unique_lock lock(f.mutex);
  const std::shared_ptr<Event> e = event->recorded;
  f.changed.wait(lock, [&] { return e->come; });
  return f.error;
}
int cuEventDestroy_v2(Handle* event) {
  delete event;
  return 0;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (const int r = enter("cuMemHostAlloc")) return r;
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  if ((flags & 3) != 3) return kInvalidValue;
  if (static_cast<long>(bytes) > f.pinned_limit) return kOutOfMemory;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*memory, 0xee, bytes);
  f.pinned[reinterpret_cast<uint64_t>(*memory)] = bytes;
  return 0;
}
int cuMemFreeHost(void* memory) {
  if (const int r = enter("cuMemFreeHost")) return r;
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  if (f.pinned.erase(reinterpret_cast<uint64_t>(memory)) == 0) return kInvalidValue;
  std::free(memory);
  return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, Stream* s) {
  if (const int r = enter("cuMemcpyHtoDAsync")) return r;
  return copy(s, to, reinterpret_cast<uint64_t>(from), bytes, true, false);
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, Stream* s) {
  if (const int r = enter("cuMemcpyDtoHAsync")) return r;
  return copy(s, reinterpret_cast<uint64_t>(to), from, bytes, false, true);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream* s) {
  if (const int r = enter("cuMemcpyDtoDAsync")) return r;
  return copy(s, to, from, bytes, true, true);
}
int cuModuleLoadData(void** module, const void* image) {
  if (const int r = enter("cuModuleLoadData")) return r;
  *module = &fake();
  const std::string text(static_cast<const char*>(image));
  for (const Launched& k : table) {
    if (text.find(std::string(".visible .entry ") + k.name + "(") == std::string::npos) return kInvalidImage;
  }
  return 0;
}
int cuModuleUnload(void*) { return enter("cuModuleUnload"); }
int cuModuleGetFunction(Launched** function, void*, const char* name) {
  if (const int r = enter("cuModuleGetFunction")) return r;
  for (Launched& k : table) {
    if (std::strcmp(k.name, name) == 0) {
      *function = &k;
      return 0;
    }
  }
  return kNotFound;
}
int cuLaunchKernel(Launched* k, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   Stream* s, void** parameters, void**) {
  if (const int r = enter("cuLaunchKernel")) return r;
  if (gx == 0 || gy != 1 || gz != 1 || bx == 0 || bx > 1024 || by != 1 || bz != 1 || shared != 0) return kInvalidValue;
  Fake& f = fake();
  const std::string name = k->name;
  // Parameters are read when it is launched, as the driver does.
  const uint64_t first = *static_cast<uint64_t*>(parameters[0]);
  const uint64_t second = *static_cast<uint64_t*>(parameters[1]);
  if (k->element != 0) {
    const uint64_t n = *static_cast<uint64_t*>(parameters[2]);
    {
      const std::lock_guard lock(f.mutex);
      if (!inside(f.blocks, first, n * k->element) || !inside(f.blocks, second, n * k->element)) return kLaunchFailed;
    }
    return work(s, [=] { add(name, seen(first), seen(second), n, gx, bx); });
  }
  return work(s, [=] {
    std::vector<kernels::Area> areas(gx);
    std::memcpy(areas.data(), seen(first), gx * sizeof(kernels::Area));
    for (kernels::Area& a : areas) a.address = reinterpret_cast<uint64_t>(seen(a.address));
    grid(gx, bx, [&] { kernels::ftar_check(areas.data(), static_cast<kernels::u32*>(seen(second))); });
  });
}
int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names = {
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},     {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"}, {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"}, {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},   {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},     {kNotFound, "CUDA_ERROR_NOT_FOUND"}};
  const auto it = names.find(result);
  if (it == names.end()) return kInvalidValue;
  *name = it->second;
  return 0;
}
int cuGetErrorString(int result, const char** text) {
  *text = result == kIllegalAddress ? "an illegal memory access was encountered" : "as the fake says";
  return 0;
}

uint64_t fake_alloc(size_t bytes) {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  const size_t whole = (bytes + 511) / 512 * 512 + 512;
  if (f.there == nullptr || f.used + whole > kMemory) return 0;
  const uint64_t address = reinterpret_cast<uint64_t>(f.there) + f.used;
  f.used += whole;
  f.blocks[address] = bytes;
  return address;
}
void fake_free_all() {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  f.blocks.clear();
  f.used = 0;
}
void fake_write(uint64_t to, const void* from, size_t bytes) { std::memcpy(seen(to), from, bytes); }
void fake_read(void* to, uint64_t from, size_t bytes) { std::memcpy(to, seen(from), bytes); }
void fake_set(const char* what, long value) {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  const std::string name = what;
  if (name == "devices") f.devices = static_cast<int>(value);
  if (name == "seed") f.seed = static_cast<unsigned>(value), f.streams = 0;
  if (name == "delay_us") f.delay_us = value;
  if (name == "pinned_limit") f.pinned_limit = value;
  if (name == "fail_task") f.fail_task = value < 0 ? -1 : f.tasks + value;
  if (name == "hang_task") f.hang_task = value < 0 ? -1 : f.tasks + value;
  if (name == "error") f.error = static_cast<int>(value);
  f.changed.notify_all();
}
void fake_fail(const char* call, long nth, int result) {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  f.fail_call = call;
  f.fail_nth = nth;
  f.fail_call_with = result;
}
void fake_hang(const char* call) {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  f.hang_call = call;
  f.changed.notify_all();
}
long fake_calls(const char* call) {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  return f.calls[call];
}
long fake_pinned_blocks() {
  Fake& f = fake();
  const std::lock_guard lock(f.mutex);
  return static_cast<long>(f.pinned.size());
}
}
