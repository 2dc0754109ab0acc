// See core.h.
#include "core.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <stdexcept>

#include "../crypto.h"

namespace ftar::nccl {

namespace {
constexpr size_t kMaxRails = 4;  // of one link: every rail of every link has a connection and heartbeats
constexpr size_t kMaxArriving = 1024;
constexpr size_t kMaxSeen = 1u << 16;
constexpr size_t kMaxWarned = 4096;
constexpr double kIdleMs = 1000;
constexpr const char* kJob = "nccl";

std::vector<RailConfig> configs(const std::vector<Nic>& nics) {
  std::vector<RailConfig> out;
  for (const Nic& n : nics) out.push_back(n.config);
  return out;
}

std::string hex(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

// How peers and operators call a process: the half of a listener's nonce that all its listeners have in common.
std::string process_name(std::string_view nonce) { return "p" + hex(nonce.substr(0, kSecretBytes / 2)); }

// "SLOT/P,P,..."; false if it is anything else.
bool parse_slots(const std::string& text, size_t rails, size_t* slot, std::vector<int>* positions) {
  const char* p = text.data();
  const char* end = p + text.size();
  auto [at, error] = std::from_chars(p, end, *slot);
  if (error != std::errc() || at == end || *at != '/') return false;
  do {
    int position = -1;
    const auto [next, bad] = std::from_chars(at + 1, end, position);
    if (bad != std::errc() || position < 0 || static_cast<size_t>(position) >= rails) return false;
    if (std::find(positions->begin(), positions->end(), position) != positions->end()) return false;
    positions->push_back(position);
    at = next;
  } while (at != end && *at == ',');
  return at == end && *slot < positions->size();
}
}  // namespace

Core::Core(Settings settings, LogFunction log)
    : settings_(std::move(settings)),
      nics_(find_rails(settings_.rails)),
      preference_(preference(nics_, settings_.backups)),
      secret_(random_bytes(kSecretBytes)),
      id_(random_bytes(kSecretBytes / 2)),
      name_(process_name(id_)),
      token_key_(settings_.token.empty() ? "" : link_key(settings_.token, kJob)),
      logger_(log),
      transport_(token_key_.empty() ? link_key(secret_, kJob) : token_key_, settings_.options, configs(nics_)) {
  std::string list;
  for (size_t i = 0; i < nics_.size(); ++i) {
    const Nic& n = nics_[i];
    polls_carrier_ = polls_carrier_ || !n.config.device.empty();
    list += (i > 0 ? ", " : "") + std::to_string(i) + " " + n.config.name + " (" + n.config.address + ")";
    if (preference_[i].size() > 1) list += " backed by " + nics_[static_cast<size_t>(preference_[i][1])].config.name;
  }
  logger_.write(kLogInfo, "devices: " + list);
  // One rail here: said once now. One in common with a peer: said when that link is made.
  one_rail_ = std::any_of(preference_.begin(), preference_.end(), [](const auto& p) { return p.size() < 2; });
  if (one_rail_) logger_.write(kLogWarn, "unprotected: a link over one rail dies with its NIC or cable");
  for (const auto& order : preference_) {
    if (order.size() < 2) continue;
    const Nic& rail = nics_[static_cast<size_t>(order[0])];
    const Nic& backup = nics_[static_cast<size_t>(order[1])];
    if (!rail.speed_known || !backup.speed_known || rail.speed_mbit <= 2 * backup.speed_mbit) continue;
    logger_.write(kLogWarn, "unequal rails: " + rail.config.name + " (" + std::to_string(rail.speed_mbit) + " Mbit/s) is backed by " +
                                backup.config.name + " (" + std::to_string(backup.speed_mbit) +
                                " Mbit/s): when it fails, training goes on at the speed of the backup");
  }
  transport_.poll_carriers();
  const char* job = ::getenv("FTAR_JOB");
  transport_.status().open({"nccl", job == nullptr ? "" : job, name_});
  transport_.on_refused([this](const std::string& host, const std::string& reason) {
    logger_.queue(kLogWarn, "a connection from " + host + " is refused: it " + reason);
  });
  transport_.start([this](Conn& conn) { on_proven(conn); }, [this](double now) { return on_tick(now); });
}

void Core::warn_once(const std::string& about, std::string text) {
  if (warned_.size() < kMaxWarned && warned_.insert(about).second) logger_.queue(kLogWarn, std::move(text));
}

Core::~Core() { shut_down(); }

void Core::shut_down() {
  {
    std::lock_guard lock(transport_.mutex());
    for (const auto& [comm, tag] : comms_) comm->link().close("the process ends", false);
  }
  transport_.stop();
  logger_.stop();
}

Listener* Core::listen(int device, unsigned char* out) {
  auto listener = std::make_unique<Listener>(*this);
  listener->nonce = id_ + random_bytes(kSecretBytes - id_.size());
  Handle handle;
  handle.device = device;
  handle.needs_token = !token_key_.empty();
  handle.secret = secret_;
  handle.nonce = listener->nonce;
  std::lock_guard lock(transport_.mutex());
  listener->rails = preference_[static_cast<size_t>(device)];
  for (const int i : listener->rails) {
    handle.rails.push_back(transport_.ports()[static_cast<size_t>(i)].address);
    if (handle.rails.back().family() == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&handle.rails.back().storage)->sin6_scope_id = static_cast<uint32_t>(i) + 1;
    }
  }
  listener->rails.resize(handle.write(out));
  listeners_[listener->nonce] = listener.get();
  ++open_;
  return listener.release();
}

// With the addresses that the rails have now.
std::vector<Nic> Core::current_nics() {
  std::vector<Nic> nics = nics_;
  std::lock_guard lock(transport_.mutex());
  for (size_t i = 0; i < nics.size(); ++i) nics[i].address = transport_.ports()[i].address;
  return nics;
}

SendComm* Core::connect(int device, const unsigned char* bytes) {
  Handle handle;
  if (const std::string problem = handle.parse(bytes); !problem.empty()) throw std::invalid_argument(problem);
  if (handle.needs_token != !token_key_.empty()) {
    throw std::invalid_argument(handle.needs_token ? "the peer has FTAR_TOKEN_FILE set and this process has not: set it on all ranks"
                                                   : "this process has FTAR_TOKEN_FILE set and the peer has not: set it on all ranks");
  }
  const std::vector<RailPair> pairs = pair_rails(current_nics(), preference_[static_cast<size_t>(device)], handle.rails, kMaxRails);
  if (pairs.empty()) throw std::invalid_argument("the peer's rails and ours have no address family (IPv4, IPv6) in common; link-local rails meet by their number");
  std::string positions;
  for (const RailPair& p : pairs) positions += (positions.empty() ? "/" : ",") + std::to_string(p.remote);
  std::vector<LinkRail> rails;
  for (size_t slot = 0; slot < pairs.size(); ++slot) {
    rails.push_back({pairs[slot].local, std::to_string(slot) + positions, handle.rails[static_cast<size_t>(pairs[slot].remote)]});
    Address& remote = rails.back().remote;
    if (remote.family() == AF_INET6) {  // their number has done its duty
      remote = parse_address(remote.host(), remote.port(), nics_[static_cast<size_t>(pairs[slot].local)].config.device);
    }
  }
  LinkName name;
  name.epoch = handle.nonce;
  name.from = name_;
  name.to = process_name(handle.nonce);
  name.key = handle.needs_token ? token_key_ : link_key(handle.secret, kJob);
  std::lock_guard lock(transport_.mutex());
  name.from_incarnation = ++connections_;
  auto comm = std::make_unique<SendComm>(*this, std::move(name), std::move(rails));
  comms_[comm.get()] = 0;
  ++open_;
  transport_.wake();
  return comm.release();
}

RecvComm* Core::accept(Listener& listener) {
  std::lock_guard lock(transport_.mutex());
  if (listener.ready.empty()) return nullptr;
  RecvComm* comm = listener.ready.front();
  listener.ready.pop_front();
  const auto it = std::find_if(listener.arriving.begin(), listener.arriving.end(), [&](const auto& c) { return c.get() == comm; });
  it->release();
  listener.arriving.erase(it);
  comm->forget_listener();
  ++open_;
  return comm;
}

void Core::close(Listener* listener) {
  const std::unique_ptr<Listener> owned(listener);
  std::lock_guard lock(transport_.mutex());
  listeners_.erase(listener->nonce);
  for (const auto& comm : listener->arriving) {
    receivers_.erase(comms_[comm.get()]);
    comms_.erase(comm.get());
    comm->link().close("stopped listening", true);
  }
  listener->arriving.clear();
  --open_;
}

void Core::close(Comm* comm) {
  std::lock_guard lock(transport_.mutex());
  const auto it = comms_.find(comm);
  if (it->second != 0) receivers_.erase(it->second);
  comms_.erase(it);
  comm->link().close("closed the connection", true);
  delete comm;
  --open_;
}

void Core::established(RecvComm& comm, Listener& listener) { listener.ready.push_back(&comm); }

void Core::on_proven(Conn& conn) {
  const Hello& hello = conn.hello();
  const uint64_t tag = link_tag(transport_.key(), hello);
  RecvComm* comm = nullptr;
  size_t slot = 0;
  std::vector<int> positions;
  if (!parse_slots(hello.rail, kMaxHandleRails, &slot, &positions)) return conn.refuse("a malformed list of rails", true);
  if (const auto it = receivers_.find(tag); it != receivers_.end()) {
    comm = it->second;
  } else {
    const auto listener = listeners_.find(hello.epoch);
    if (listener == listeners_.end()) return conn.refuse("nobody listens for this handle any more", true);
    Listener& l = *listener->second;
    if (l.seen.contains(tag)) return conn.refuse("this connection is over here", true);
    if (l.arriving.size() >= kMaxArriving || l.seen.size() >= kMaxSeen) return conn.refuse("too many connections for one handle");
    for (const int p : positions) {
      if (static_cast<size_t>(p) >= l.rails.size()) return conn.refuse("a rail that the handle does not have", true);
    }
    comm = arrive(l, hello, tag, positions);
  }
  const std::vector<LinkRail>& rails = comm->link().rails();
  if (slot >= rails.size() || rails[slot].local != conn.rail()) return conn.refuse("this is another rail than the hello says");
  comm->recv_link().attach(conn, static_cast<int>(slot));
}

RecvComm* Core::arrive(Listener& listener, const Hello& hello, uint64_t tag, const std::vector<int>& positions) {
  LinkName name;
  name.epoch = hello.epoch;
  name.from = hello.from;
  name.to = hello.to;
  name.from_incarnation = hello.from_incarnation;
  name.to_incarnation = hello.to_incarnation;
  std::vector<LinkRail> rails;
  for (const int p : positions) rails.push_back({listener.rails[static_cast<size_t>(p)], "", {}});
  listener.seen.insert(tag);
  auto owned = std::make_unique<RecvComm>(*this, std::move(name), std::move(rails), &listener);
  RecvComm* comm = owned.get();
  listener.arriving.push_back(std::move(owned));
  receivers_[tag] = comm;
  comms_[comm] = tag;
  return comm;
}

double Core::on_tick(double now) {
  if (comms_.empty()) return now + kIdleMs;
  if (polls_carrier_) transport_.poll_carriers();
  for (const auto& [comm, tag] : comms_) comm->link().tick(now);
  // A connection that ended before it was whole is nobody's.
  for (const auto& [nonce, listener] : listeners_) {
    std::erase_if(listener->arriving, [&](const std::unique_ptr<RecvComm>& comm) {
      if (comm->error() == kSuccess || comm->link().ready()) return false;
      receivers_.erase(comms_[comm.get()]);
      comms_.erase(comm.get());
      return true;
    });
  }
  const Options& o = transport_.options();
  const int beat = std::clamp(o.heartbeat_ms / 4, 1, 10);
  return now + std::min({beat, std::max(1, o.probe_interval_ms), polls_carrier_ ? o.carrier_poll_ms : beat});
}

}  // namespace ftar::nccl
