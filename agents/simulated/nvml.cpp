// A libnvidia-ml.so.1 without a GPU: the NVML functions that the agent calls, for the real pynvml, read from a file.
//
// The file (environment variable FTCTL_SIMULATED_GPUS) has lines `key=value`; it is replaced by rename, never changed
// in place. Keys: gpus, driver_loaded, driver_version, delay.FUNCTION (seconds), event.N ("GPU XID"), gpu.I.NAME.
// What has no key is not supported, as on a GPU that has not got it. The structures are those of NVML's ABI (nvml.h).
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#define NVML extern "C" __attribute__((visibility("default")))

namespace {

using Return = int;
constexpr Return SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, NOT_LOADED = 9,
                 TIMEOUT = 10, LOST = 15;
constexpr unsigned MAX_GPUS = 64;
using Clock = std::chrono::steady_clock;

struct State {
  std::unordered_map<std::string, std::string> values;
  uint64_t last_event = 0;

  const std::string* find(const std::string& key) const {
    auto found = values.find(key);
    return found == values.end() ? nullptr : &found->second;
  }
  double number(const std::string& key, double otherwise) const {
    auto* text = find(key);
    return text ? std::strtod(text->c_str(), nullptr) : otherwise;
  }
};

struct Device {
  unsigned index;
};

struct EventSet {
  uint64_t seen;
  uint64_t watched;  // bit per GPU
  std::mutex mutex;
};

std::mutex mutex;
std::shared_ptr<const State> state = std::make_shared<State>();
struct stat read_from {};
bool initialized = false;
std::array<Device, MAX_GPUS> devices;

std::shared_ptr<const State> now() {
  std::lock_guard lock(mutex);
  const char* path = std::getenv("FTCTL_SIMULATED_GPUS");
  struct stat file {};
  if (!path || stat(path, &file) != 0) return state = std::make_shared<State>();
  if (file.st_ino == read_from.st_ino && file.st_mtim.tv_sec == read_from.st_mtim.tv_sec &&
      file.st_mtim.tv_nsec == read_from.st_mtim.tv_nsec && file.st_size == read_from.st_size)
    return state;
  auto fresh = std::make_shared<State>();
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    auto equals = line.find('=');
    if (equals == std::string::npos) continue;
    auto key = line.substr(0, equals);
    if (key.starts_with("event."))
      fresh->last_event = std::max<uint64_t>(fresh->last_event, std::strtoull(key.c_str() + 6, nullptr, 10));
    fresh->values[std::move(key)] = line.substr(equals + 1);
  }
  read_from = file;
  return state = fresh;
}

// A call that hangs: for as long as the file says so, at most the seconds that it says.
void wait_as_told(const char* function) {
  auto key = std::string("delay.") + function;
  auto start = Clock::now();
  for (;;) {
    std::chrono::duration<double> passed = Clock::now() - start;
    if (now()->number(key, 0) <= passed.count()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

unsigned count(const State& s) { return std::min<unsigned>(MAX_GPUS, static_cast<unsigned>(s.number("gpus", 0))); }

struct Gpu {
  std::shared_ptr<const State> s;
  std::string prefix;
  Return error;

  // What the GPU tells under that name, if it is there and tells it.
  Return read(const char* name, double& value) const {
    if (error) return error;
    auto* text = s->find(prefix + name);
    if (!text) return NOT_SUPPORTED;
    value = std::strtod(text->c_str(), nullptr);
    return SUCCESS;
  }
  template <typename T>
  Return put(const char* name, T* to) const {
    double value = 0;
    if (!to) return INVALID;
    if (auto failed = read(name, value)) return failed;
    *to = static_cast<T>(value);
    return SUCCESS;
  }
  Return text(const char* name, char* to, unsigned size) const {
    if (error) return error;
    auto* found = s->find(prefix + name);
    if (!found) return NOT_SUPPORTED;
    if (found->size() + 1 > size) return INSUFFICIENT_SIZE;
    std::memcpy(to, found->c_str(), found->size() + 1);
    return SUCCESS;
  }
};

Gpu at(const char* function, const Device* device) {
  wait_as_told(function);
  auto s = now();
  if (!initialized) return {s, "", UNINITIALIZED};
  if (!device || device < devices.data() || device >= devices.data() + count(*s)) return {s, "", INVALID};
  auto prefix = "gpu." + std::to_string(device->index) + ".";
  return {s, prefix, s->number(prefix + "lost", 0) != 0 ? LOST : SUCCESS};
}
#define GPU at(__func__, device)

}  // namespace

NVML Return nvmlInitWithFlags(unsigned) {
  wait_as_told(__func__);
  if (now()->number("driver_loaded", 0) == 0) return NOT_LOADED;
  for (unsigned i = 0; i < MAX_GPUS; i++) devices[i].index = i;
  initialized = true;
  return SUCCESS;
}
NVML Return nvmlInit_v2() { return nvmlInitWithFlags(0); }
NVML Return nvmlShutdown() {
  initialized = false;
  return SUCCESS;
}

NVML const char* nvmlErrorString(Return code) {
  switch (code) {
    case SUCCESS: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case 13: return "Function Not Found";
    case LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

NVML Return nvmlSystemGetDriverVersion(char* to, unsigned size) {
  wait_as_told(__func__);
  return Gpu{now(), "", initialized ? SUCCESS : UNINITIALIZED}.text("driver_version", to, size);
}
NVML Return nvmlDeviceGetCount_v2(unsigned* to) {
  wait_as_told(__func__);
  if (!initialized) return UNINITIALIZED;
  *to = count(*now());
  return SUCCESS;
}
// The handle of a lost GPU can still be had: the driver knows it from before.
NVML Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** to) {
  wait_as_told(__func__);
  if (!initialized) return UNINITIALIZED;
  if (index >= count(*now())) return INVALID;
  *to = &devices[index];
  return SUCCESS;
}
NVML Return nvmlDeviceGetIndex(Device* device, unsigned* to) {
  auto gpu = GPU;
  if (!gpu.error) *to = device->index;
  return gpu.error;
}
NVML Return nvmlDeviceGetUUID(Device* device, char* to, unsigned size) { return GPU.text("uuid", to, size); }
NVML Return nvmlDeviceGetName(Device* device, char* to, unsigned size) { return GPU.text("name", to, size); }
struct PciInfo {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem_id;
  char text[32];
};
NVML Return nvmlDeviceGetPciInfo_v3(Device* device, PciInfo* to) {
  *to = {};
  if (auto error = GPU.text("pci", to->text, sizeof to->text)) return error;
  if (std::sscanf(to->text, "%x:%x:%x", &to->domain, &to->bus, &to->device) != 3) return NOT_SUPPORTED;
  std::snprintf(to->legacy, sizeof to->legacy, "%04x:%02x:%02x.0", to->domain & 0xffff, to->bus & 0xff, to->device & 0xff);
  return SUCCESS;
}

struct Memory {
  unsigned long long total, free, used;
};
NVML Return nvmlDeviceGetMemoryInfo(Device* device, Memory* to) {
  auto gpu = GPU;
  if (auto failed = gpu.put("memory_total", &to->total)) return failed;
  if (auto failed = gpu.put("memory_used", &to->used)) return failed;
  to->free = to->total - to->used;
  return SUCCESS;
}
struct Utilization {
  unsigned gpu, memory;
};
NVML Return nvmlDeviceGetUtilizationRates(Device* device, Utilization* to) {
  to->memory = 0;
  return GPU.put("utilization", &to->gpu);
}
NVML Return nvmlDeviceGetPowerUsage(Device* device, unsigned* to) { return GPU.put("power_mw", to); }
NVML Return nvmlDeviceGetEnforcedPowerLimit(Device* device, unsigned* to) { return GPU.put("power_limit_mw", to); }
NVML Return nvmlDeviceGetTemperature(Device* device, int, unsigned* to) { return GPU.put("temperature", to); }
NVML Return nvmlDeviceGetTemperatureThreshold(Device* device, int which, unsigned* to) {
  return which == 1 ? GPU.put("temperature_slowdown", to) : NOT_SUPPORTED;
}
struct Margin {
  unsigned version;
  int celsius;
};
NVML Return nvmlDeviceGetMarginTemperature(Device* device, Margin* to) { return GPU.put("temperature_margin", &to->celsius); }
NVML Return nvmlDeviceGetClockInfo(Device* device, int which, unsigned* to) {
  return GPU.put(which == 1 ? "clock_sm" : "clock_other", to);
}
NVML Return nvmlDeviceGetMaxClockInfo(Device* device, int which, unsigned* to) {
  return GPU.put(which == 1 ? "clock_sm_max" : "clock_other_max", to);
}
NVML Return nvmlDeviceGetTotalEccErrors(Device* device, int uncorrected, int aggregate, unsigned long long* to) {
  static constexpr const char* names[] = {"ecc_corrected", "ecc_corrected_aggregate", "ecc_uncorrected",
                                          "ecc_uncorrected_aggregate"};
  if (uncorrected < 0 || uncorrected > 1 || aggregate < 0 || aggregate > 1) return INVALID;
  return GPU.put(names[uncorrected * 2 + aggregate], to);
}
NVML Return nvmlDeviceGetRemappedRows(Device* device, unsigned* corrected, unsigned* uncorrected, unsigned* pending,
                                      unsigned* failed) {
  auto gpu = GPU;
  if (auto error = gpu.put("remap_correctable", corrected)) return error;
  if (auto error = gpu.put("remap_uncorrectable", uncorrected)) return error;
  if (auto error = gpu.put("remap_pending", pending)) return error;
  return gpu.put("remap_failure", failed);
}
NVML Return nvmlDeviceGetRetiredPages(Device* device, int, unsigned* pages, unsigned long long* addresses) {
  unsigned there = 0, room = *pages;
  if (auto error = GPU.put("retired_pages", &there)) return error;
  *pages = there;
  if (!addresses || room < there) return there ? INSUFFICIENT_SIZE : SUCCESS;
  for (unsigned i = 0; i < there; i++) addresses[i] = (i + 1) * 0x10000ULL;
  return SUCCESS;
}
NVML Return nvmlDeviceGetCurrentClocksEventReasons(Device* device, unsigned long long* to) {
  return GPU.put("throttle", to);
}
struct Violation {
  unsigned long long reference, time;
};
NVML Return nvmlDeviceGetViolationStatus(Device* device, int policy, Violation* to) {
  to->reference = static_cast<unsigned long long>(Clock::now().time_since_epoch().count()) / 1000;
  return GPU.put(policy == 1 ? "violation_thermal_ns" : policy == 0 ? "violation_power_ns" : "violation_other_ns", &to->time);
}
NVML Return nvmlDeviceGetCurrPcieLinkGeneration(Device* device, unsigned* to) { return GPU.put("pcie_gen", to); }
NVML Return nvmlDeviceGetMaxPcieLinkGeneration(Device* device, unsigned* to) { return GPU.put("pcie_gen_max", to); }
NVML Return nvmlDeviceGetCurrPcieLinkWidth(Device* device, unsigned* to) { return GPU.put("pcie_width", to); }
NVML Return nvmlDeviceGetMaxPcieLinkWidth(Device* device, unsigned* to) { return GPU.put("pcie_width_max", to); }
NVML Return nvmlDeviceGetPcieReplayCounter(Device* device, unsigned* to) { return GPU.put("pcie_replays", to); }
NVML Return nvmlDeviceGetNvLinkState(Device* device, unsigned link, unsigned* to) {
  return GPU.put(("nvlink." + std::to_string(link) + ".up").c_str(), to);
}
NVML Return nvmlDeviceGetNvLinkErrorCounter(Device* device, unsigned link, int kind, unsigned long long* to) {
  return GPU.put(("nvlink." + std::to_string(link) + ".errors." + std::to_string(kind)).c_str(), to);
}
struct Fabric {
  unsigned char cluster[16];
  unsigned status, clique, state;
};
NVML Return nvmlDeviceGetGpuFabricInfo(Device* device, Fabric* to) {
  std::memset(to, 0, sizeof *to);
  auto gpu = GPU;
  if (auto error = gpu.put("fabric_status", &to->status)) return error;
  return gpu.put("fabric_state", &to->state);
}
struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  union {
    double d;
    unsigned ui;
    unsigned long long ull;
  } value;
};
NVML Return nvmlDeviceGetFieldValues(Device* device, int n, FieldValue* values) {
  auto gpu = GPU;
  if (gpu.error) return gpu.error;
  for (int i = 0; i < n; i++) {
    values[i].type = 1;  // unsigned int
    values[i].value.ull = 0;
    values[i].result = gpu.put(("field." + std::to_string(values[i].field)).c_str(), &values[i].value.ui);
  }
  return SUCCESS;
}
struct Process {
  unsigned pid;
  unsigned long long memory;
  unsigned instance, compute;
};
NVML Return nvmlDeviceGetComputeRunningProcesses_v3(Device* device, unsigned* n, Process* to) {
  auto gpu = GPU;
  if (gpu.error) return gpu.error;
  auto* pids = gpu.s->find(gpu.prefix + "pids");
  if (!pids) return NOT_SUPPORTED;
  unsigned room = *n;
  *n = 0;
  for (const char* at = pids->c_str(); *at;) {
    char* end = nullptr;
    auto pid = static_cast<unsigned>(std::strtoul(at, &end, 10));
    if (end == at) break;
    if (*n < room && to) to[*n] = {pid, 1ULL << 30, ~0U, ~0U};
    ++*n;
    at = *end ? end + 1 : end;
  }
  return *n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

NVML Return nvmlEventSetCreate(EventSet** to) {
  wait_as_told(__func__);
  if (!initialized) return UNINITIALIZED;
  *to = new EventSet{now()->last_event, 0, {}};
  return SUCCESS;
}
NVML Return nvmlEventSetFree(EventSet* set) {
  delete set;
  return SUCCESS;
}
NVML Return nvmlDeviceRegisterEvents(Device* device, unsigned long long types, EventSet* set) {
  if (auto error = GPU.error) return error;
  if (types & ~8ULL) return NOT_SUPPORTED;  // Xids are the only ones here
  std::lock_guard lock(set->mutex);
  set->watched |= 1ULL << device->index;
  return SUCCESS;
}
struct EventData {
  Device* device;
  unsigned long long type, data;
  unsigned instance, compute;
};
NVML Return nvmlEventSetWait_v2(EventSet* set, EventData* to, unsigned timeout_ms) {
  wait_as_told(__func__);
  auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  for (;;) {
    auto s = now();
    {
      std::lock_guard lock(set->mutex);
      while (set->seen < s->last_event) {
        auto* event = s->find("event." + std::to_string(++set->seen));
        if (!event) continue;
        char* rest = nullptr;
        auto gpu = std::strtoul(event->c_str(), &rest, 10);
        if (gpu >= MAX_GPUS || !(set->watched >> gpu & 1)) continue;
        *to = {&devices[gpu], 8, std::strtoull(rest, nullptr, 10), ~0U, ~0U};
        return SUCCESS;
      }
    }
    if (Clock::now() >= end) return TIMEOUT;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}
