// NCCL 2.20 to 2.27: translation only.
#include "api.h"

namespace ftar::nccl {
namespace {

Result v8_properties(int device, PropertiesV8* out) {
  DeviceInfo info{};
  if (const Result r = device_info(device, &info); r != kSuccess) return r;
  *out = PropertiesV8{};
  out->name = const_cast<char*>(info.name);
  out->pci_path = const_cast<char*>(info.pci_path);
  out->guid = info.guid;
  out->pointer_support = kPointerHost;
  out->speed_mbit = info.speed_mbit;
  out->port = device;
  out->max_comms = kMaxComms;
  out->max_receives = 1;
  return kSuccess;
}
Result v8_connect(int device, void* handle, void** comm, void**) { return connect(device, handle, comm); }
Result v8_accept(void* listener, void** comm, void**) { return accept(listener, comm); }
Result v8_register(void* comm, void*, size_t, int type, void** memory) { return register_memory(comm, type, memory); }
Result v8_isend(void* comm, void* data, int bytes, int, void*, void** request) {
  return bytes < 0 ? kInvalidArgument : isend(comm, data, static_cast<uint64_t>(bytes), request);
}
Result v8_irecv(void* comm, int n, void** data, int* bytes, int*, void**, void** request) {
  return n != 1 || bytes[0] < 0 ? kInvalidArgument : irecv(comm, n, data, static_cast<uint64_t>(bytes[0]), request);
}
Result v8_iflush(void*, int, void**, int*, void**, void** request) { return iflush(request); }

}  // namespace
}  // namespace ftar::nccl

extern "C" {
__attribute__((visibility("default"))) ftar::nccl::NetV8 ncclNetPlugin_v8 = {
    .name = ftar::nccl::kName,
    .init = ftar::nccl::start,
    .devices = ftar::nccl::devices,
    .get_properties = ftar::nccl::v8_properties,
    .listen = ftar::nccl::listen,
    .connect = ftar::nccl::v8_connect,
    .accept = ftar::nccl::v8_accept,
    .register_memory = ftar::nccl::v8_register,
    .register_dmabuf = nullptr,
    .deregister_memory = ftar::nccl::deregister_memory,
    .isend = ftar::nccl::v8_isend,
    .irecv = ftar::nccl::v8_irecv,
    .iflush = ftar::nccl::v8_iflush,
    .test = ftar::nccl::test,
    .close_send = ftar::nccl::close_send,
    .close_receive = ftar::nccl::close_receive,
    .close_listen = ftar::nccl::close_listen,
    .get_device_memory = nullptr,
    .receive_consumed = nullptr,
};
}
