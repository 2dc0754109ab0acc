// A libnccl that needs no GPU: it exports the functions that ftar_core/nccllib.py calls, adds up host memory of real
// processes over TCP on the loopback interface, and behaves as the real one does where that hurts:
//
// * nothing blocks but ncclCommAbort; what was begun is done when ncclCommGetAsyncError says so, and a call before that
//   is an error. An operation may be put on its stream a while after the call has returned;
// * it does not notice that a member is gone: who waits for it waits until it is aborted;
// * an aborted operation ends, with garbage in its target, and its stream goes on;
// * members that put operations in different order are told so here, where the real one would hang or add up nonsense.
//
// Streams and events of a device are here, too (fake_*): a thread that takes one task after the other.
//
// Environment: FAKE_NCCL_SWITCHES, a directory in which the files hang-init, hang-reduce, hang-abort, hold-launch,
// fail-init and async-error (or NAME.FAKE_NCCL_NAME for one process) make that happen; async-error and fail-init are used up.
// FAKE_NCCL_LOG: a file for a line "NAME PID WHAT LIVE" at each communicator made and aborted. FAKE_NCCL_VERSION.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { kSuccess = 0, kSystem = 2, kInternal = 3, kArgument = 4, kUsage = 5, kRemote = 6, kInProgress = 7 };
enum Type { kInt32 = 2, kInt64 = 4, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9 };

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

std::string env(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

std::string switch_file(const char* what) {
  const std::string folder = env("FAKE_NCCL_SWITCHES");
  if (folder.empty()) return "";
  for (const std::string& path : {folder + "/" + what + "." + env("FAKE_NCCL_NAME"), folder + "/" + what}) {
    if (::access(path.c_str(), F_OK) == 0) return path;
  }
  return "";
}

bool on(const char* what) { return !switch_file(what).empty(); }

bool take(const char* what) {
  const std::string path = switch_file(what);
  return !path.empty() && ::unlink(path.c_str()) == 0;
}

std::atomic<int> live{0};

void log(const char* what) {
  const std::string path = env("FAKE_NCCL_LOG");
  if (path.empty()) return;
  const std::string line = env("FAKE_NCCL_NAME") + " " + std::to_string(::getpid()) + " " + what + " " + std::to_string(live) + "\n";
  const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0600);
  if (fd < 0 || ::write(fd, line.data(), line.size()) < 0) std::abort();
  ::close(fd);
}

// --- a device's stream

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t put = 0, done = 0;

  Stream() {
    std::thread([this] {
      std::unique_lock<std::mutex> hold(lock);
      while (true) {
        changed.wait(hold, [this] { return !tasks.empty(); });
        const auto task = std::move(tasks.front());
        tasks.pop_front();
        hold.unlock();
        task();
        hold.lock();
        ++done;
        changed.notify_all();
      }
    }).detach();
  }

  void add(std::function<void()> task) {
    const std::lock_guard<std::mutex> hold(lock);
    tasks.push_back(std::move(task));
    ++put;
    changed.notify_all();
  }
};

// --- a communicator

struct Id {
  char magic[8];
  uint16_t port;
  uint64_t nonce;
};

struct Header {
  uint64_t sequence, count;
  int32_t type, rank;
};

size_t size_of(int type) { return type == kInt64 || type == kFloat64 ? 8 : type == kBfloat16 ? 2 : 4; }

float widen(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
void add(void* into, const void* more, size_t count) {
  for (size_t i = 0; i < count; ++i) static_cast<T*>(into)[i] += static_cast<const T*>(more)[i];
}

void add(void* into, const void* more, size_t count, int type) {
  if (type == kInt32) return add<int32_t>(into, more, count);
  if (type == kInt64) return add<int64_t>(into, more, count);
  if (type == kFloat32) return add<float>(into, more, count);
  if (type == kFloat64) return add<double>(into, more, count);
  auto* sums = static_cast<uint16_t*>(into);
  for (size_t i = 0; i < count; ++i) sums[i] = narrow(widen(sums[i]) + widen(static_cast<const uint16_t*>(more)[i]));
}

// The listening sockets of ids that this process has minted, by port.
std::mutex minted_lock;
std::vector<std::pair<uint16_t, int>> minted;

struct Comm {
  int members, me;
  Id id;
  std::atomic<bool> aborted{false};
  std::atomic<int> state{kInProgress};
  std::atomic<int> busy{0};  // threads and tasks that use this
  std::vector<int> peers;    // of rank 0: by rank; of others: {to rank 0}
  uint64_t sequence = 0;
  std::string last_error;

  void hang() {
    while (!aborted) nap();
  }

  // False: aborted. A member that is gone sends nothing any more, which is not noticed.
  bool move(int fd, void* data, size_t bytes, bool sending) {
    auto* at = static_cast<char*>(data);
    while (bytes > 0) {
      if (aborted) return false;
      pollfd wait{fd, static_cast<short>(sending ? POLLOUT : POLLIN), 0};
      if (::poll(&wait, 1, 5) <= 0) continue;
      const ssize_t n = sending ? ::send(fd, at, bytes, MSG_NOSIGNAL) : ::recv(fd, at, bytes, 0);
      if (n <= 0) {
        hang();
        return false;
      }
      at += n;
      bytes -= static_cast<size_t>(n);
    }
    return true;
  }

  bool host_of_all(int listener) {
    peers.assign(static_cast<size_t>(members), -1);
    for (int missing = members - 1; missing > 0;) {
      if (aborted) return false;
      pollfd wait{listener, POLLIN, 0};
      if (::poll(&wait, 1, 5) <= 0) continue;
      const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      Header hello{};
      if (fd < 0 || !move(fd, &hello, sizeof hello, false)) return false;
      if (hello.sequence != id.nonce) {  // a member of a communicator that is gone, whose port this is now
        ::close(fd);
        continue;
      }
      peers[static_cast<size_t>(hello.rank)] = fd;
      --missing;
    }
    char go = 1;
    for (int rank = 1; rank < members; ++rank) {
      if (!move(peers[static_cast<size_t>(rank)], &go, 1, true)) return false;
    }
    return true;
  }

  bool connect() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = id.port;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      if (aborted) {
        ::close(fd);
        return false;
      }
      nap();
    }
    peers = {fd};
    Header hello{id.nonce, 0, 0, me};
    char go = 0;
    return move(fd, &hello, sizeof hello, true) && move(fd, &go, 1, false);
  }

  void join() {
    if (on("hang-init")) hang();
    if (take("fail-init")) {
      last_error = "no route to a member";
      state = kSystem;
      return;
    }
    bool good = false;
    if (me == 0) {
      int listener = -1;
      {
        const std::lock_guard<std::mutex> hold(minted_lock);
        for (const auto& [port, fd] : minted) {
          if (port == id.port) listener = fd;
        }
      }
      if (listener < 0) std::abort();  // who mints an id must be rank 0
      good = host_of_all(listener);
    } else {
      good = connect();
    }
    if (good) state = kSuccess;
  }

  void reduce(const void* source, void* target, size_t count, int type, uint64_t number) {
    if (on("hang-reduce")) hang();
    if (take("async-error")) {
      last_error = "a member has closed its connection";
      state = kRemote;
      hang();
    }
    if (aborted) return;
    Header mine{number, count, type, me};
    const size_t bytes = count * size_of(type);
    std::vector<char> sum(static_cast<const char*>(source), static_cast<const char*>(source) + bytes);
    if (me != 0) {
      const int fd = peers[0];
      if (move(fd, &mine, sizeof mine, true) && move(fd, sum.data(), bytes, true) && move(fd, sum.data(), bytes, false)) {
        std::memcpy(target, sum.data(), bytes);
      }
      return;
    }
    std::vector<char> theirs(bytes);
    for (int rank = 1; rank < members; ++rank) {
      Header header{};
      if (!move(peers[static_cast<size_t>(rank)], &header, sizeof header, false)) return;
      if (header.sequence != number || header.count != count || header.type != type) {
        last_error = "operation " + std::to_string(number) + " of rank " + std::to_string(rank) + " is of " +
                     std::to_string(header.count) + " elements, of rank 0 of " + std::to_string(count);
        state = kUsage;
        return hang();
      }
      if (!move(peers[static_cast<size_t>(rank)], theirs.data(), bytes, false)) return;
      add(sum.data(), theirs.data(), count, type);
    }
    for (int rank = 1; rank < members; ++rank) {
      if (!move(peers[static_cast<size_t>(rank)], sum.data(), bytes, true)) return;
    }
    std::memcpy(target, sum.data(), bytes);
  }
};

template <typename F>
void beside(Comm* comm, F work) {
  ++comm->busy;
  std::thread([comm, work] {
    work();
    --comm->busy;
  }).detach();
}

thread_local std::string said;

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

struct UniqueId {
  char internal[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

API int ncclGetVersion(int* version) {
  *version = env("FAKE_NCCL_VERSION").empty() ? 22703 : std::atoi(env("FAKE_NCCL_VERSION").c_str());
  return kSuccess;
}

API const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSystem: return "unhandled system error";
    case kArgument: return "invalid argument";
    case kUsage: return "invalid usage";
    case kRemote: return "remote process exited or there was a network error";
    default: return "internal error";
  }
}

API const char* ncclGetLastError(Comm* comm) {
  said = comm == nullptr ? "" : comm->last_error;
  return said.c_str();
}

API int ncclGetUniqueId(UniqueId* out) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(fd, 64) != 0) return kSystem;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const Id id{{'F', 'A', 'K', 'E'}, address.sin_port, static_cast<uint64_t>(now) ^ static_cast<uint64_t>(::getpid()) << 40};
  std::memset(out, 0x5A, sizeof *out);  // every byte must arrive
  std::memcpy(out, &id, sizeof id);
  const std::lock_guard<std::mutex> hold(minted_lock);
  minted.emplace_back(id.port, fd);
  return kSuccess;
}

API int ncclCommInitRankConfig(Comm** out, int members, UniqueId name, int me, Config* config) {
  if (config->magic != 0xCAFEBEEF || config->size < 48 || config->version < 21700 || config->blocking != 0) return kArgument;
  auto comm = std::make_unique<Comm>();
  comm->members = members;
  comm->me = me;
  std::memcpy(&comm->id, name.internal, sizeof comm->id);
  if (std::strcmp(comm->id.magic, "FAKE") != 0 || name.internal[127] != 0x5A) return kArgument;
  Comm* made = *out = comm.release();
  ++live;
  log("made");
  beside(made, [made] { made->join(); });
  return kInProgress;
}

API int ncclCommGetAsyncError(Comm* comm, int* state) {
  *state = comm->state;
  return kSuccess;
}

API int ncclAllReduce(const void* source, void* target, size_t count, int type, int operation, Comm* comm, Stream* stream) {
  if (comm->state == kInProgress) {
    comm->last_error = "a call while another is in progress";
    return kUsage;
  }
  if (comm->state != kSuccess) return comm->state;
  if (operation != 0 || stream == nullptr || source == target) return kArgument;
  const uint64_t number = comm->sequence++;
  const auto work = [=] {
    comm->reduce(source, target, count, type, number);
    --comm->busy;
  };
  if (number % 4 != 0) {
    ++comm->busy;
    stream->add(work);
    return kSuccess;
  }
  comm->state = kInProgress;  // it connects something first, and then comes to the stream
  beside(comm, [=] {
    for (int i = 0; i < 3 || on("hold-launch"); ++i) nap();
    ++comm->busy;
    stream->add(work);
    int launching = kInProgress;
    comm->state.compare_exchange_strong(launching, kSuccess);  // unless it has failed by now
  });
  return kInProgress;
}

#ifndef WITHOUT_ABORT
API int ncclCommAbort(Comm* comm) {
  while (on("hang-abort")) nap();
  comm->aborted = true;
  while (comm->busy > 0) nap();
  for (const int fd : comm->peers) {
    if (fd >= 0) ::close(fd);
  }
  if (comm->me == 0) {
    const std::lock_guard<std::mutex> hold(minted_lock);
    std::erase_if(minted, [&](const auto& entry) { return entry.first == comm->id.port && ::close(entry.second) == 0; });
  }
  --live;
  log("aborted");
  delete comm;
  return kSuccess;
}
#endif

// --- a device in host memory

API Stream* fake_stream() { return new Stream; }

API uint64_t fake_mark(Stream* stream) {
  const std::lock_guard<std::mutex> hold(stream->lock);
  return stream->put;
}

API void fake_wait(Stream* stream, uint64_t mark) {
  std::unique_lock<std::mutex> hold(stream->lock);
  stream->changed.wait(hold, [&] { return stream->done >= mark; });
}

API void fake_copy(Stream* stream, void* target, const void* source, size_t bytes) {
  stream->add([=] { std::memcpy(target, source, bytes); });
}

API int fake_live() { return live; }
