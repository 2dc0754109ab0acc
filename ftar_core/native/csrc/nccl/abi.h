// NCCL's network plugin interface, versions 8, 11 and 12: our own declarations of the structures that NCCL reads.
//
// NCCL looks up a data symbol `ncclNetPlugin_vN` with the newest N it knows: v12 from 2.30, v11 in 2.28 and 2.29, v8
// serves 2.20 to 2.27 (which would take 9 and 10 too, and find this one). Sizes and offsets are asserted, since a wrong
// one would be read as another function.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ftar::nccl {

using Result = int;  // ncclResult_t
inline constexpr Result kSuccess = 0;
inline constexpr Result kSystemError = 2;
inline constexpr Result kInternalError = 3;
inline constexpr Result kInvalidArgument = 4;
inline constexpr Result kInvalidUsage = 5;
inline constexpr Result kRemoteError = 6;

inline constexpr size_t kHandleBytes = 128;
inline constexpr int kMaxRequests = 32;  // NCCL has at most so many of a connection in flight
inline constexpr int kPointerHost = 1;
inline constexpr uint64_t kMaxBytes = uint64_t{1} << 40;
inline constexpr int kUnset = -1;

inline constexpr int kLogWarn = 2;
inline constexpr int kLogInfo = 3;
inline constexpr unsigned long kLogNet = 0x10;  // NCCL_DEBUG_SUBSYS=NET
using LogFunction = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

struct PropertiesV8 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int speed_mbit;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
};
static_assert(sizeof(PropertiesV8) == 64);

struct PropertiesV11 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbit;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  struct {
    int count;
    int devices[4];
  } virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
};
static_assert(sizeof(PropertiesV11) == 112);
static_assert(offsetof(PropertiesV11, speed_mbit) == 36);
static_assert(offsetof(PropertiesV11, virtual_device) == 64);
static_assert(offsetof(PropertiesV11, max_p2p_bytes) == 88);
static_assert(offsetof(PropertiesV11, max_multi_request) == 104);

struct PropertiesV12 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbit;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  struct {
    int count;
    int devices[8];
  } virtual_device;
  size_t max_p2p_bytes;
  size_t max_collective_bytes;
  int max_multi_request;
  int16_t rail_id;
  int16_t plane_id;
};
static_assert(sizeof(PropertiesV12) == 128);
static_assert(offsetof(PropertiesV12, speed_mbit) == 36);
static_assert(offsetof(PropertiesV12, virtual_device) == 64);
static_assert(offsetof(PropertiesV12, max_p2p_bytes) == 104);
static_assert(offsetof(PropertiesV12, rail_id) == 124);

struct Config {
  int traffic_class;
};

struct NetV8 {
  const char* name;
  Result (*init)(LogFunction log);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, PropertiesV8* properties);
  Result (*listen)(int device, void* handle, void** listen_comm);
  Result (*connect)(int device, void* handle, void** send_comm, void** device_handle);
  Result (*accept)(void* listen_comm, void** receive_comm, void** device_handle);
  Result (*register_memory)(void* comm, void* data, size_t bytes, int type, void** memory);
  Result (*register_dmabuf)(void* comm, void* data, size_t bytes, int type, uint64_t offset, int fd, void** memory);
  Result (*deregister_memory)(void* comm, void* memory);
  Result (*isend)(void* comm, void* data, int bytes, int tag, void* memory, void** request);
  Result (*irecv)(void* comm, int n, void** data, int* bytes, int* tags, void** memory, void** request);
  Result (*iflush)(void* comm, int n, void** data, int* bytes, void** memory, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_receive)(void* comm);
  Result (*close_listen)(void* comm);
  Result (*get_device_memory)(void* comm, void* memory, void** device_pointer);
  Result (*receive_consumed)(void* comm, int n, void* request);
};
static_assert(sizeof(NetV8) == 152);

template <typename Properties>
struct NetNew {
  const char* name;
  Result (*init)(void** context, uint64_t comm_id, Config* config, LogFunction log, void* profiler);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, Properties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listen_comm);
  Result (*connect)(void* context, int device, void* handle, void** send_comm, void** device_handle);
  Result (*accept)(void* listen_comm, void** receive_comm, void** device_handle);
  Result (*register_memory)(void* comm, void* data, size_t bytes, int type, void** memory);
  Result (*register_dmabuf)(void* comm, void* data, size_t bytes, int type, uint64_t offset, int fd, void** memory);
  Result (*deregister_memory)(void* comm, void* memory);
  Result (*isend)(void* comm, void* data, size_t bytes, int tag, void* memory, void* profile, void** request);
  Result (*irecv)(void* comm, int n, void** data, size_t* bytes, int* tags, void** memory, void** profile, void** request);
  Result (*iflush)(void* comm, int n, void** data, int* bytes, void** memory, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_receive)(void* comm);
  Result (*close_listen)(void* comm);
  Result (*get_device_memory)(void* comm, void* memory, void** device_pointer);
  Result (*receive_consumed)(void* comm, int n, void* request);
  Result (*make_virtual_device)(int* device, void* properties);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, void* attributes);
};
using NetV11 = NetNew<PropertiesV11>;
using NetV12 = NetNew<PropertiesV12>;
static_assert(sizeof(NetV11) == 176 && sizeof(NetV12) == 176);
static_assert(offsetof(NetV12, test) == 13 * sizeof(void*) && offsetof(NetV12, finalize) == 20 * sizeof(void*));

}  // namespace ftar::nccl
