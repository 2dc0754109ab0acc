// What versions 11 and 12 have in common: everything but the tail of the properties. Translation only.
#pragma once
#include "api.h"

namespace ftar::nccl {

template <typename Properties>
struct Translate {
  static Result init(void** context, uint64_t, Config*, LogFunction log, void*) {
    *context = nullptr;
    const Result r = start(log);
    if (r == kSuccess) *context = const_cast<char*>(kName);  // there is nothing to tell communicators apart by
    return r;
  }
  static Result properties(int device, Properties* out) {
    DeviceInfo info{};
    if (const Result r = device_info(device, &info); r != kSuccess) return r;
    *out = Properties{};
    out->name = const_cast<char*>(info.name);
    out->pci_path = const_cast<char*>(info.pci_path);
    out->guid = info.guid;
    out->pointer_support = kPointerHost;
    out->speed_mbit = info.speed_mbit;
    out->port = device;
    out->max_comms = kMaxComms;
    out->max_receives = 1;
    out->virtual_device.count = 1;
    out->virtual_device.devices[0] = device;
    out->max_p2p_bytes = kMaxBytes;
    out->max_collective_bytes = kMaxBytes;
    out->max_multi_request = 1;
    if constexpr (requires { out->rail_id; }) out->rail_id = out->plane_id = kUnset;
    return kSuccess;
  }
  static Result listen(void*, int device, void* handle, void** comm) { return ftar::nccl::listen(device, handle, comm); }
  static Result connect(void*, int device, void* handle, void** comm, void**) { return ftar::nccl::connect(device, handle, comm); }
  static Result accept(void* listener, void** comm, void**) { return ftar::nccl::accept(listener, comm); }
  static Result register_memory(void* comm, void*, size_t, int type, void** memory) {
    return ftar::nccl::register_memory(comm, type, memory);
  }
  static Result isend(void* comm, void* data, size_t bytes, int, void*, void*, void** request) {
    return ftar::nccl::isend(comm, data, bytes, request);
  }
  static Result irecv(void* comm, int n, void** data, size_t* bytes, int*, void**, void**, void** request) {
    return n != 1 ? kInvalidArgument : ftar::nccl::irecv(comm, n, data, bytes[0], request);
  }
  static Result iflush(void*, int, void**, int*, void**, void** request) { return ftar::nccl::iflush(request); }
  static Result finalize(void*) { return stop(); }

  static constexpr NetNew<Properties> table() {
    return {
        .name = kName,
        .init = init,
        .devices = devices,
        .get_properties = properties,
        .listen = listen,
        .connect = connect,
        .accept = accept,
        .register_memory = register_memory,
        .register_dmabuf = nullptr,
        .deregister_memory = deregister_memory,
        .isend = isend,
        .irecv = irecv,
        .iflush = iflush,
        .test = test,
        .close_send = close_send,
        .close_receive = close_receive,
        .close_listen = close_listen,
        .get_device_memory = nullptr,
        .receive_consumed = nullptr,
        .make_virtual_device = nullptr,
        .finalize = finalize,
        .set_attributes = nullptr,
    };
  }
};

}  // namespace ftar::nccl
