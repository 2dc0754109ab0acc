// The functions of the CUDA driver that are called here, found with dlopen: a machine without a driver builds and runs the
// same program. Types and numbers as in the driver's own header (CUDA Driver API reference manual); nothing is included
// from the toolkit. Where the driver has several versions of a function, the one that has been there since CUDA 4 or 10.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace ftar::cuda {

using Result = int;
using DeviceId = int;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using EventHandle = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

constexpr Result kSuccess = 0;
constexpr unsigned kStreamNonBlocking = 1;   // does not wait for the default stream, nor that for it
constexpr unsigned kEventBlockingSync = 1;   // who waits for it sleeps
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostPortable = 1;        // pinned for all contexts
constexpr unsigned kHostDeviceMap = 2;       // kernels may read and write it, at the same address

// name of the member, symbol, arguments
#define FTAR_CUDA_FUNCTIONS(F)                                                                                        \
  F(init, "cuInit", (unsigned flags))                                                                                 \
  F(device_count, "cuDeviceGetCount", (int* count))                                                                   \
  F(device_get, "cuDeviceGet", (DeviceId * device, int ordinal))                                                      \
  F(device_name, "cuDeviceGetName", (char* name, int bytes, DeviceId device))                                         \
  F(context_retain, "cuDevicePrimaryCtxRetain", (Context * context, DeviceId device))                                 \
  F(context_release, "cuDevicePrimaryCtxRelease_v2", (DeviceId device))                                               \
  F(context_push, "cuCtxPushCurrent_v2", (Context context))                                                           \
  F(context_pop, "cuCtxPopCurrent_v2", (Context * context))                                                           \
  F(stream_create, "cuStreamCreate", (Stream * stream, unsigned flags))                                               \
  F(stream_destroy, "cuStreamDestroy_v2", (Stream stream))                                                            \
  F(stream_wait, "cuStreamWaitEvent", (Stream stream, EventHandle event, unsigned flags))                             \
  F(event_create, "cuEventCreate", (EventHandle * event, unsigned flags))                                             \
  F(event_record, "cuEventRecord", (EventHandle event, Stream stream))                                                \
  F(event_synchronize, "cuEventSynchronize", (EventHandle event))                                                     \
  F(event_destroy, "cuEventDestroy_v2", (EventHandle event))                                                          \
  F(host_alloc, "cuMemHostAlloc", (void** memory, size_t bytes, unsigned flags))                                      \
  F(host_free, "cuMemFreeHost", (void* memory))                                                                       \
  F(to_device, "cuMemcpyHtoDAsync_v2", (uint64_t to, const void* from, size_t bytes, Stream stream))                  \
  F(to_host, "cuMemcpyDtoHAsync_v2", (void* to, uint64_t from, size_t bytes, Stream stream))                          \
  F(on_device, "cuMemcpyDtoDAsync_v2", (uint64_t to, uint64_t from, size_t bytes, Stream stream))                     \
  F(module_load, "cuModuleLoadData", (Module * module, const void* image))                                            \
  F(module_unload, "cuModuleUnload", (Module module))                                                                 \
  F(module_function, "cuModuleGetFunction", (Function * function, Module module, const char* name))                   \
  F(launch, "cuLaunchKernel",                                                                                         \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,        \
     unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra))                        \
  F(error_name, "cuGetErrorName", (Result result, const char** name))                                                 \
  F(error_string, "cuGetErrorString", (Result result, const char** text))

struct Driver {
#define FTAR_CUDA_MEMBER(member, symbol, arguments) Result(*member) arguments = nullptr;
  FTAR_CUDA_FUNCTIONS(FTAR_CUDA_MEMBER)
#undef FTAR_CUDA_MEMBER

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  std::string describe(Result result) const;
};

// The driver in `library`, which stays loaded for good: a driver that is unloaded while a thread of its own runs takes
// the process with it. Throws DeviceError: no such library, or it lacks a function.
const Driver& load_driver(const std::string& library);

}  // namespace ftar::cuda
