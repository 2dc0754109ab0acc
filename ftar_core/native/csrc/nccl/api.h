// The plugin in its own words; the ABI files (v8.cpp, v11.cpp, v12.cpp) translate to and from these and do nothing else.
// Every function may be called from any thread, and none throws.
#pragma once
#include "abi.h"

namespace ftar::nccl {

struct DeviceInfo {
  const char* name;
  const char* pci_path;  // nullptr: unknown
  uint64_t guid;
  int speed_mbit;
};
inline constexpr const char* kName = "FTAR";
inline constexpr int kMaxComms = 1 << 16;

Result start(LogFunction log);  // once for each communicator
Result stop();                  // the counterpart; not called by v8
Result devices(int* count);
Result device_info(int device, DeviceInfo* info);
Result listen(int device, void* handle, void** listen_comm);
Result connect(int device, void* handle, void** send_comm);
Result accept(void* listen_comm, void** receive_comm);  // success and nullptr: nobody yet
Result register_memory(void* comm, int type, void** memory);
Result deregister_memory(void* comm, void* memory);
Result isend(void* comm, void* data, uint64_t bytes, void** request);
Result irecv(void* comm, int n, void** data, uint64_t bytes, void** request);
Result iflush(void** request);
Result test(void* request, int* done, int* bytes);
Result close_send(void* comm);
Result close_receive(void* comm);
Result close_listen(void* comm);

}  // namespace ftar::nccl
