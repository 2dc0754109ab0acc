// See api.h. The one place that maps errors to NCCL's results.
#include "api.h"

#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>

#include "../bytes.h"
#include "../crypto.h"
#include "../link_health.h"
#include "core.h"

namespace ftar::nccl {

namespace {

struct Process {
  std::mutex mutex;
  Core* core = nullptr;
  int users = 0;
  pid_t pid = 0;
};

// Never destroyed: NCCL's threads may still call while the process ends.
Process& process() {
  static Process* p = new Process;
  return *p;
}

// NCCL keeps the pointers of the properties for as long as it likes.
const char* forever(const std::string& text) {
  static std::mutex mutex;
  static auto* texts = new std::set<std::string>;
  std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

void say(LogFunction log, const std::string& text) {
  if (log != nullptr) log(kLogWarn, kLogNet, "libnccl-net-ftar", 0, "NET/FTAR : %s", text.c_str());
}

template <typename Action>
Result guarded(LogFunction log, Action&& action) {
  try {
    return action();
  } catch (const std::invalid_argument& e) {
    say(log, e.what());
    return kInvalidUsage;
  } catch (const std::system_error& e) {
    say(log, e.what());
    return kSystemError;
  } catch (const std::bad_alloc&) {
    say(log, "out of memory");
    return kSystemError;
  } catch (const std::exception& e) {
    say(log, e.what());
    return kInternalError;
  }
}

// For calls on a connection.
template <typename Action>
Result guarded_by(Comm& comm, Action&& action) {
  try {
    return action();
  } catch (const std::exception& e) {
    comm.core().logger().write(kLogWarn, e.what());
    return kSystemError;
  }
}

// Whoever hears of the error has its reason in the log.
Result failed(Comm& comm, Result error) {
  comm.core().logger().catch_up();
  return error;
}

template <typename Action>
Result with_core(Action&& action) {
  Process& p = process();
  std::lock_guard lock(p.mutex);
  if (p.core == nullptr) return kInvalidUsage;
  Core& core = *p.core;
  try {
    return action(core);
  } catch (const std::invalid_argument& e) {
    core.logger().write(kLogWarn, e.what());
    return kInvalidUsage;
  } catch (const std::exception& e) {
    core.logger().write(kLogWarn, e.what());
    return kSystemError;
  }
}

// With the process's mutex.
void stop_if_unused(Process& p) {
  if (p.users > 0 || p.core == nullptr || p.core->open() > 0 || p.core->transport().forked()) return;
  delete p.core;
  p.core = nullptr;
}

// The I/O thread must not outlive the library (dlclose) or what it uses (static objects at exit). A forked child has no
// such thread.
void at_exit() {
  Process& p = process();
  if (p.pid != ::getpid()) return;
  std::lock_guard lock(p.mutex);
  if (p.core != nullptr) p.core->shut_down();
}

template <typename Closing>
Result close(Closing* what) {
  if (what == nullptr) return kSuccess;
  Process& p = process();
  std::lock_guard lock(p.mutex);
  if (p.core == nullptr) return kInternalError;
  if (p.core->transport().forked()) return kSuccess;  // the parent's
  p.core->close(what);
  stop_if_unused(p);
  return kSuccess;
}

bool known_device(Core& core, int device) { return device >= 0 && static_cast<size_t>(device) < core.nics().size(); }

}  // namespace

Result start(LogFunction log) {
  Process& p = process();
  std::lock_guard lock(p.mutex);
  return guarded(log, [&] {
    if (p.core != nullptr && p.pid != ::getpid()) {
      p.core = nullptr;  // a forked child: the threads stayed with the parent, and so does all this
      p.users = 0;
    }
    if (p.core == nullptr) {
      rail_table();  // made before the handler below, so destroyed after it has run
      p.core = new Core(read_settings(), log);
      static const bool once = std::atexit(at_exit) == 0;
      static_cast<void>(once);
      p.pid = ::getpid();
    } else {
      p.core->logger().set(log);
    }
    ++p.users;
    return kSuccess;
  });
}

Result stop() {
  Process& p = process();
  std::lock_guard lock(p.mutex);
  if (p.users > 0) --p.users;
  stop_if_unused(p);
  return kSuccess;
}

Result devices(int* count) {
  return with_core([&](Core& core) {
    *count = static_cast<int>(core.nics().size());
    return kSuccess;
  });
}

Result device_info(int device, DeviceInfo* info) {
  return with_core([&](Core& core) {
    if (!known_device(core, device)) return kInvalidArgument;
    const Nic& nic = core.nics()[static_cast<size_t>(device)];
    info->name = forever(nic.config.name);
    info->pci_path = nic.pci_path.empty() ? nullptr : forever(nic.pci_path);
    info->guid = get64(sha256("rail " + nic.config.device + " " + nic.config.address).data());
    info->speed_mbit = nic.speed_mbit;
    return kSuccess;
  });
}

Result listen(int device, void* handle, void** listen_comm) {
  return with_core([&](Core& core) {
    if (!known_device(core, device)) return kInvalidArgument;
    *listen_comm = core.listen(device, static_cast<unsigned char*>(handle));
    return kSuccess;
  });
}

Result connect(int device, void* handle, void** send_comm) {
  *send_comm = nullptr;
  return with_core([&](Core& core) {
    if (!known_device(core, device)) return kInvalidArgument;
    *send_comm = static_cast<Comm*>(core.connect(device, static_cast<const unsigned char*>(handle)));
    return kSuccess;
  });
}

Result accept(void* listen_comm, void** receive_comm) {
  Listener& listener = *static_cast<Listener*>(listen_comm);
  RecvComm* comm = listener.core.accept(listener);
  *receive_comm = comm == nullptr ? nullptr : static_cast<Comm*>(comm);
  return kSuccess;
}

Result register_memory(void* comm, int type, void** memory) {
  if (type != kPointerHost) return kInvalidUsage;
  *memory = comm;
  return kSuccess;
}

Result deregister_memory(void*, void*) { return kSuccess; }

Result isend(void* comm, void* data, uint64_t bytes, void** request) {
  *request = nullptr;
  auto& c = static_cast<SendComm&>(*static_cast<Comm*>(comm));
  if (const Result error = c.error(); error != kSuccess) return failed(c, error);
  if (bytes > kMaxBytes) return kInvalidArgument;
  return guarded_by(c, [&] {
    std::lock_guard lock(c.core().transport().mutex());
    *request = c.send(data, bytes);
    return kSuccess;
  });
}

Result irecv(void* comm, int n, void** data, uint64_t bytes, void** request) {
  *request = nullptr;
  auto& c = static_cast<RecvComm&>(*static_cast<Comm*>(comm));
  if (n != 1) return kInvalidArgument;  // maxRecvs is 1
  if (const Result error = c.error(); error != kSuccess) return failed(c, error);
  return guarded_by(c, [&] {
    std::lock_guard lock(c.core().transport().mutex());
    *request = c.receive(data[0], bytes);
    return kSuccess;
  });
}

Result iflush(void** request) {
  *request = nullptr;  // host memory: what was received is there
  return kSuccess;
}

Result test(void* request, int* done, int* bytes) {
  auto& r = *static_cast<Request*>(request);
  *done = 0;
  r.comm->link().asked();
  // The error first: a request that was finished before the connection ended is then still seen as finished.
  const Result error = r.comm->error();
  if (r.state.load(std::memory_order_acquire) != Request::done) {
    if (error != kSuccess) return failed(*r.comm, error);
    const Result moved = guarded_by(*r.comm, [&] {
      r.comm->progress();
      return kSuccess;
    });
    if (moved != kSuccess || r.state.load(std::memory_order_acquire) != Request::done) return moved;
  }
  *done = 1;
  if (bytes != nullptr) *bytes = static_cast<int>(std::min<uint64_t>(r.bytes.load(std::memory_order_relaxed), INT_MAX));
  r.state.store(Request::free, std::memory_order_release);
  return kSuccess;
}

Result close_send(void* comm) { return close(static_cast<Comm*>(comm)); }

Result close_receive(void* comm) { return close(static_cast<Comm*>(comm)); }

Result close_listen(void* comm) { return close(static_cast<Listener*>(comm)); }

}  // namespace ftar::nccl
