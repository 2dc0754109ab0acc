// The texts of FTAR_NET_*: the first byte chooses the variable. Whatever is wrong is std::invalid_argument, which
// becomes one line for the user; any other exception would be an error of ours.
#include "settings.h"

#include <cstdlib>
#include <stdexcept>

#include "fuzz.h"
#include "rails.h"

using namespace ftar::nccl;

namespace {
constexpr const char* kNames[] = {"FTAR_NET_RAILS", "FTAR_NET_BACKUP", "FTAR_NET_TIMEOUT_S", "FTAR_NET_OPTIONS"};

void read_all() {
  try {
    const Settings s = read_settings();
    must(s.options.problem().empty(), "settings that are taken are in their ranges");
    must(s.options.unreachable_ms >= 1 && s.options.unreachable_ms <= 3'600'000, "a bound is bounded");
    const std::vector<Nic> rails = find_rails(s.rails);
    must(!rails.empty(), "there are rails, or an error");
    const auto order = preference(rails, s.backups);
    must(order.size() == rails.size(), "every rail has an order");
    for (size_t i = 0; i < order.size(); ++i) must(order[i].at(0) == static_cast<int>(i), "a rail is its own first choice");
  } catch (const std::invalid_argument& e) {
    must(e.what()[0] != '\0', "an error says what is wrong");
  }
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1 || size > 512) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  for (const char* name : kNames) ::unsetenv(name);
  ::setenv("FTAR_NET_RAILS", "rail0=127.0.0.1,rail1=127.0.0.2,rail2=127.0.0.3@lo", 1);
  ::setenv(kNames[data[0] % 4], text.c_str(), 1);
  read_all();
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> out;
  const auto add = [&](char variable, const char* text) { out.push_back(variable + std::string(text)); };
  add('\0', "lo");
  add('\0', "rail0=127.0.0.1,rail1=127.0.0.2@lo");
  add('\0', "a=::1@lo,b=fe80::1@lo,c=10.1.0.3");
  add('\1', "none");
  add('\1', "rail0=rail1,rail1=rail2,rail2=rail0");
  add('\2', "0.25");
  add('\2', "3600");
  add('\3', "heartbeat_ms=50,heartbeat_misses=3,hold_down_ms=20,hold_down_max_ms=20,probe_interval_ms=10");
  add('\3', "congestion=cubic,window_bytes=1048576,probe_echoes=5,handshake_ms=3000,carrier_poll_ms=2");
  add('\3', "mode=stripe,unposted_bytes=2147483647");
  return out;
}
