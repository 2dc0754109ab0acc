// See settings.h.
#include "settings.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string_view>

extern char** environ;

namespace ftar::nccl {

namespace {

constexpr std::string_view kPrefix = "FTAR_NET_";
constexpr std::string_view kKnown[] = {"FTAR_NET_RAILS", "FTAR_NET_BACKUP", "FTAR_NET_TIMEOUT_S", "FTAR_NET_OPTIONS"};
constexpr size_t kMinToken = 16;  // as ftar_core/wire/tokens.py
constexpr size_t kMaxToken = 4096;
constexpr double kMaxTimeoutS = 3600;
// A connection of NCCL has a few large buffers, and their memory is NCCL's: a wide window costs nothing here.
constexpr int kWindowBytes = 64 << 20;

struct Field {
  const char* name;
  int Options::*member;
};
constexpr Field kFields[] = {
    {"heartbeat_ms", &Options::heartbeat_ms},         {"heartbeat_misses", &Options::heartbeat_misses},
    {"carrier_poll_ms", &Options::carrier_poll_ms},   {"hold_down_ms", &Options::hold_down_ms},
    {"hold_down_max_ms", &Options::hold_down_max_ms}, {"probe_echoes", &Options::probe_echoes},
    {"probe_interval_ms", &Options::probe_interval_ms}, {"handshake_ms", &Options::handshake_ms},
    {"window_bytes", &Options::window_bytes},         {"unposted_bytes", &Options::unposted_bytes},
};

std::string read(const char* name) {
  const char* value = ::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void wrong(const std::string& variable, const std::string& value, const std::string& reason) {
  throw std::invalid_argument(variable + "=" + value + ": " + reason);
}

void check_names() {
  for (char** e = environ; e != nullptr && *e != nullptr; ++e) {
    const std::string_view entry(*e);
    if (!entry.starts_with(kPrefix)) continue;
    const std::string_view name = entry.substr(0, entry.find('='));
    if (std::find(std::begin(kKnown), std::end(kKnown), name) != std::end(kKnown)) continue;
    std::string known;
    for (const std::string_view k : kKnown) known += (known.empty() ? "" : ", ") + std::string(k);
    throw std::invalid_argument(std::string(name) + ": there is no such setting (there are: " + known + ")");
  }
}

void read_options(const std::string& text, Options* options) {
  size_t at = 0;
  while (at < text.size()) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, comma - at);
    at = comma + 1;
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    if (equals != std::string::npos && (name == "congestion" || name == "mode")) {
      (name == "mode" ? options->mode : options->congestion) = part.substr(equals + 1);
      continue;
    }
    const auto field = std::find_if(std::begin(kFields), std::end(kFields), [&](const Field& f) { return name == f.name; });
    if (field == std::end(kFields) || equals == std::string::npos) {
      std::string known = "mode, congestion";
      for (const Field& f : kFields) known += std::string(", ") + f.name;
      wrong("FTAR_NET_OPTIONS", text, "'" + part + "' is not NAME=VALUE with a name of: " + known);
    }
    int value = 0;
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data() + equals + 1, end, value);
    if (error != std::errc() || stop != end) wrong("FTAR_NET_OPTIONS", text, "'" + part + "' does not end in a whole number");
    options->*field->member = value;
  }
}

std::string read_token(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) wrong("FTAR_TOKEN_FILE", path, std::strerror(errno));
  std::string token(kMaxToken + 1, '\0');
  struct stat status {};
  const bool known = ::fstat(fd, &status) == 0;
  const ssize_t n = known && S_ISREG(status.st_mode) ? ::read(fd, token.data(), token.size()) : -1;
  ::close(fd);
  if (!known || n < 0) wrong("FTAR_TOKEN_FILE", path, "not a regular file that can be read");
  if ((status.st_mode & 077) != 0) wrong("FTAR_TOKEN_FILE", path, "other users may read or write it; run: chmod 600 " + path);
  token.resize(static_cast<size_t>(n));
  if (token.size() > kMaxToken) wrong("FTAR_TOKEN_FILE", path, "longer than 4096 bytes, so it is no token");
  constexpr const char* kSpace = " \t\r\n\v\f";
  token.erase(0, std::min(token.find_first_not_of(kSpace), token.size()));
  token.erase(token.find_last_not_of(kSpace) + 1);
  if (token.size() < kMinToken) wrong("FTAR_TOKEN_FILE", path, "fewer than 16 bytes");
  return token;
}

}  // namespace

Settings read_settings() {
  check_names();
  Settings s;
  s.rails = read("FTAR_NET_RAILS");
  s.backups = read("FTAR_NET_BACKUP");
  if (const std::string path = read("FTAR_TOKEN_FILE"); !path.empty()) s.token = read_token(path);
  s.options.window_bytes = kWindowBytes;
  read_options(read("FTAR_NET_OPTIONS"), &s.options);
  double timeout_s = 30;
  if (const std::string text = read("FTAR_NET_TIMEOUT_S"); !text.empty()) {
    char* end = nullptr;
    timeout_s = std::strtod(text.c_str(), &end);
    if (*end != '\0' || !std::isfinite(timeout_s) || timeout_s <= 0 || timeout_s > kMaxTimeoutS) {
      wrong("FTAR_NET_TIMEOUT_S", text, "write seconds, more than 0 and at most 3600");
    }
  }
  s.options.unreachable_ms = std::max(1, static_cast<int>(std::lround(timeout_s * 1e3)));
  // A handshake that takes longer than the whole bound would stretch it.
  s.options.handshake_ms = std::min(s.options.handshake_ms, s.options.unreachable_ms);
  if (const std::string problem = s.options.problem(); !problem.empty()) {
    wrong("FTAR_NET_OPTIONS", read("FTAR_NET_OPTIONS"), problem);
  }
  return s;
}

}  // namespace ftar::nccl
