// The document of the status socket: JSON, a slice at a time. Schema and parser: ftar_core/wire/linkstatus.py.
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "link.h"
#include "status_socket.h"
#include "transport.h"

namespace ftar {

namespace {
constexpr int kSchema = 2;
constexpr size_t kSliceLinks = 16;
constexpr size_t kMaxDocument = 3u << 20;  // readers take 4 MiB; links beyond this are counted, not shown
constexpr size_t kMaxText = 200;
constexpr const char* kSilent = "nothing is heard on any rail: the peer or its host has stopped, or is cut off";

// Whatever the bytes are (a peer's reason, a user's rail name), the document is ASCII and valid JSON.
void put(std::string& out, std::string_view text) {
  constexpr const char* kHex = "0123456789abcdef";
  out += '"';
  for (const char c : text.substr(0, kMaxText)) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u >= 0x7f) {
      out += "\\u00";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

void put(std::string& out, double value) {  // printf would write the user's decimal comma
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, 3);
  out.append(text, error == std::errc() ? end : text);
  if (error != std::errc()) out += '0';
}

void put(std::string& out, uint64_t value) { out += std::to_string(value); }
void put(std::string& out, int value) { out += std::to_string(value); }
void put(std::string& out, bool value) { out += value ? "true" : "false"; }

template <typename Value>
void field(std::string& out, const char* name, const Value& value, char before = ',') {
  out += before;
  out += '"';
  out += name;
  out += "\":";
  put(out, value);
}
}  // namespace

void StatusSocket::write_slice(Reader& r) const {
  r.total += r.out.size();
  r.out.clear();
  r.sent = 0;
  if (r.first) {
    write_head(r.out, r);
    r.first = false;
    return;
  }
  for (size_t i = 0; i < kSliceLinks && r.next < r.links.size(); ++i, ++r.next) {
    const auto it = links_.find(r.links[r.next]);
    if (it == links_.end()) continue;  // closed since
    if (r.total + r.out.size() > kMaxDocument) {
      ++r.left_out;
      continue;
    }
    if (r.any_link) r.out += ',';
    r.any_link = true;
    write_link(r.out, it->first, it->second, r.since_ms);
  }
  if (r.next < r.links.size()) return;
  r.out += ']';
  field(r.out, "left_out", r.left_out);
  r.out += "}\n";
  r.last = true;
}

void StatusSocket::write_head(std::string& out, const Reader& reader) const {
  const double now = reader.since_ms;
  field(out, "schema", kSchema, '{');
  field(out, "pid", static_cast<int>(::getpid()));
  field(out, "kind", std::string_view(about_.kind));
  field(out, "job", std::string_view(about_.job));
  field(out, "name", std::string_view(about_.name));
  field(out, "rank", std::string_view(rank_));
  field(out, "age_s", (now - opened_ms_) / 1e3);
  field(out, "mode", std::string_view(transport_.options().mode));
  field(out, "merge_ms", kMergeMs);
  out += ",\"rails\":[";
  for (const RailPort& port : transport_.ports()) {
    if (out.back() != '[') out += ',';
    field(out, "name", std::string_view(port.config.name), '{');
    field(out, "device", std::string_view(port.config.device));
    field(out, "address", std::string_view(port.address.host()));
    field(out, "carrier", port.carrier);
    out += '}';
  }
  out += "],\"changes\":[";
  for (const Change& c : changes_) {
    if (out.back() != '[') out += ',';
    field(out, "seq", c.seq, '{');
    field(out, "age_s", std::max(0.0, (now - c.at_ms) / 1e3));
    field(out, "kind", std::string_view(c.kind));
    field(out, "links", c.links);
    field(out, "peer", std::string_view(c.peer));
    field(out, "direction", std::string_view(c.direction));
    field(out, "rail", std::string_view(c.rail));
    field(out, "from", std::string_view(c.from));
    field(out, "to", std::string_view(c.to));
    field(out, "reason", std::string_view(c.reason));
    field(out, "detect_ms", c.detect_ms);
    out += '}';
  }
  out += ']';
  field(out, "links_total", static_cast<uint64_t>(reader.links.size()));
  out += ",\"links\":[";
}

void StatusSocket::write_link(std::string& out, uint64_t id, const Entry& entry, double now) const {
  const LinkEnd& link = *entry.link;
  field(out, "id", id, '{');
  field(out, "peer", std::string_view(link.peer()));
  field(out, "direction", std::string_view(direction(link)));
  field(out, "resumes", link.resumes());
  out += ",\"rails\":[";
  for (size_t i = 0; i < link.rails().size(); ++i) {
    const int slot = static_cast<int>(i);
    const LinkRail& rail = link.rails()[i];
    const LinkRailStat s = link.stat(slot, now);
    const bool silent = s.silent_ms > 0 && (s.verdict.state == RailState::up || s.verdict.state == RailState::hold);
    const double hold = s.verdict.state == RailState::hold ? std::max(0.0, s.verdict.hold_until_ms - now) : 0.0;
    if (i > 0) out += ',';
    field(out, "rail", rail.local, '{');
    field(out, "address", std::string_view(rail.remote.length > 0 ? rail.remote.host() : ""));
    field(out, "state", std::string_view(silent ? "SILENT" : ftar::name(s.verdict.state)));
    field(out, "reason", std::string_view(silent ? kSilent : s.verdict.reason));
    field(out, "since_s", silent ? s.silent_ms / 1e3 : std::max(0.0, (now - s.verdict.since_ms) / 1e3));
    field(out, "flaps", s.verdict.flaps);
    field(out, "bytes", s.bytes);
    field(out, "active", s.active);
    field(out, "hold_left_ms", hold);
    field(out, "detect_ms", entry.detect_ms[i]);
    field(out, "retransmits", link.retransmits(slot));
    out += '}';
  }
  out += "]}";
}

}  // namespace ftar
