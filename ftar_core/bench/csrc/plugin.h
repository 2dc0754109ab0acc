// The plugin as NCCL loads it: dlopen, the data symbol of one version, and the calls of its table.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "abi.h"
#include "channel.h"

namespace ftar::bench {

struct LogLine {
  int64_t ns;  // CLOCK_MONOTONIC, when the plugin said it
  int level;
  std::string text;
};

// One communicator: init in the constructor, finalize in close(). Settings are the environment's at that moment.
class Plugin {
 public:
  Plugin(const std::string& path, int version);  // throws std::runtime_error, with the plugin's own words
  ~Plugin();
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  int devices();
  std::pair<uint64_t, std::string> listen(int device);  // listener, handle
  std::shared_ptr<Channel> try_connect(int device, const std::string& handle);  // nullptr: ask again
  std::shared_ptr<Channel> try_accept(uint64_t listener);
  void close_listen(uint64_t listener);
  void close();
  static std::vector<LogLine> take_log();  // what was said since the last call, by all communicators of this process

 private:
  friend class PluginChannel;
  void check(int result, const char* call) const;
  const nccl::NetV8* v8_ = nullptr;
  const nccl::NetV12* new_ = nullptr;  // v11 has the same calls; its properties are not asked for here
  void* context_ = nullptr;
  bool open_ = false;
};

}  // namespace ftar::bench
