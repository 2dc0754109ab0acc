// See plugin.h.
#include "plugin.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace ftar::bench {

namespace {
constexpr size_t kMaxLines = 1u << 18;

struct Log {
  std::mutex mutex;
  std::deque<LogLine> lines;
};

// Never destroyed: the plugin's thread may still talk while the process ends.
Log& log_lines() {
  static Log* log = new Log;
  return *log;
}

void said(int level, unsigned long, const char*, int, const char* format, ...) {
  const int64_t now = now_ns();
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Log& log = log_lines();
  std::lock_guard lock(log.mutex);
  if (log.lines.size() >= kMaxLines) log.lines.pop_front();
  log.lines.push_back({now, level, text});
}
}  // namespace

class PluginChannel final : public Channel {
 public:
  PluginChannel(Plugin& plugin, void* comm, bool sender) : plugin_(plugin), comm_(comm), sender_(sender) {}
  ~PluginChannel() override {
    if (comm_ != nullptr && plugin_.open_) finish();
  }

  void* isend(const void* data, size_t bytes) override {
    void* request = nullptr;
    void* from = const_cast<void*>(data);
    const int result = plugin_.v8_ != nullptr ? plugin_.v8_->isend(comm_, from, static_cast<int>(bytes), 0, comm_, &request)
                                              : plugin_.new_->isend(comm_, from, bytes, 0, comm_, nullptr, &request);
    if (result != 0) plugin_.check(result, "isend");
    return request;
  }

  void* irecv(void* into, size_t bytes) override {
    void* request = nullptr;
    int tag = 0;
    int old_bytes = static_cast<int>(bytes);
    void* profile = nullptr;
    const int result = plugin_.v8_ != nullptr
                           ? plugin_.v8_->irecv(comm_, 1, &into, &old_bytes, &tag, &comm_, &request)
                           : plugin_.new_->irecv(comm_, 1, &into, &bytes, &tag, &comm_, &profile, &request);
    if (result != 0) plugin_.check(result, "irecv");
    return request;
  }

  bool test(void* request, size_t* bytes) override {
    int done = 0;
    int size = 0;
    const int result = plugin_.v8_ != nullptr ? plugin_.v8_->test(request, &done, &size) : plugin_.new_->test(request, &done, &size);
    if (result != 0) plugin_.check(result, "test");
    *bytes = static_cast<size_t>(size);
    return done != 0;
  }

  void close() override {
    if (comm_ == nullptr) return;
    const int result = finish();
    comm_ = nullptr;
    plugin_.check(result, sender_ ? "closeSend" : "closeRecv");
  }

 private:
  int finish() {
    if (plugin_.v8_ != nullptr) return sender_ ? plugin_.v8_->close_send(comm_) : plugin_.v8_->close_receive(comm_);
    return sender_ ? plugin_.new_->close_send(comm_) : plugin_.new_->close_receive(comm_);
  }

  Plugin& plugin_;
  void* comm_;
  const bool sender_;
};

Plugin::Plugin(const std::string& path, int version) {
  if (version != 8 && version != 11 && version != 12) {
    throw std::runtime_error("there is no version " + std::to_string(version) + " of the interface here: 8, 11 and 12 are known");
  }
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: NCCL closes it at the very end
  if (library == nullptr) throw std::runtime_error(::dlerror());
  const std::string symbol = "ncclNetPlugin_v" + std::to_string(version);
  const void* table = ::dlsym(library, symbol.c_str());
  if (table == nullptr) throw std::runtime_error(path + " has no " + symbol);
  int result = 0;
  if (version == 8) {
    v8_ = static_cast<const nccl::NetV8*>(table);
    result = v8_->init(said);
  } else {
    new_ = static_cast<const nccl::NetV12*>(table);
    nccl::Config config{nccl::kUnset};
    result = new_->init(&context_, 1, &config, said, nullptr);
  }
  check(result, "init");
  open_ = true;
}

Plugin::~Plugin() { close(); }

void Plugin::close() {
  if (open_ && new_ != nullptr) new_->finalize(context_);
  open_ = false;
}

void Plugin::check(int result, const char* call) const {
  if (result == 0) return;
  std::string words = std::string("the plugin's ") + call + " returned " + std::to_string(result);
  Log& log = log_lines();
  std::lock_guard lock(log.mutex);
  for (auto line = log.lines.rbegin(); line != log.lines.rend(); ++line) {
    if (line->level > nccl::kLogWarn) continue;
    words += ": " + line->text;
    break;
  }
  throw std::runtime_error(words);
}

int Plugin::devices() {
  int count = 0;
  check(v8_ != nullptr ? v8_->devices(&count) : new_->devices(&count), "devices");
  return count;
}

std::pair<uint64_t, std::string> Plugin::listen(int device) {
  std::string handle(nccl::kHandleBytes, '\0');
  void* listener = nullptr;
  check(v8_ != nullptr ? v8_->listen(device, handle.data(), &listener) : new_->listen(context_, device, handle.data(), &listener),
        "listen");
  return {reinterpret_cast<uint64_t>(listener), handle};
}

std::shared_ptr<Channel> Plugin::try_connect(int device, const std::string& handle) {
  if (handle.size() != nccl::kHandleBytes) throw std::runtime_error("a handle has 128 bytes");
  std::string copy = handle;
  void* comm = nullptr;
  void* device_handle = nullptr;
  check(v8_ != nullptr ? v8_->connect(device, copy.data(), &comm, &device_handle)
                       : new_->connect(context_, device, copy.data(), &comm, &device_handle),
        "connect");
  return comm == nullptr ? nullptr : std::make_shared<PluginChannel>(*this, comm, true);
}

std::shared_ptr<Channel> Plugin::try_accept(uint64_t listener) {
  void* comm = nullptr;
  void* device_handle = nullptr;
  void* from = reinterpret_cast<void*>(listener);
  check(v8_ != nullptr ? v8_->accept(from, &comm, &device_handle) : new_->accept(from, &comm, &device_handle), "accept");
  return comm == nullptr ? nullptr : std::make_shared<PluginChannel>(*this, comm, false);
}

void Plugin::close_listen(uint64_t listener) {
  void* which = reinterpret_cast<void*>(listener);
  check(v8_ != nullptr ? v8_->close_listen(which) : new_->close_listen(which), "closeListen");
}

std::vector<LogLine> Plugin::take_log() {
  Log& log = log_lines();
  std::lock_guard lock(log.mutex);
  std::vector<LogLine> taken(std::make_move_iterator(log.lines.begin()), std::make_move_iterator(log.lines.end()));
  log.lines.clear();
  return taken;
}

}  // namespace ftar::bench
