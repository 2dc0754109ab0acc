// See paths.h.
#include "paths.h"

#include <sys/socket.h>

#include <algorithm>

namespace ftar {

namespace {
constexpr int kMostReads = 64;  // in one go; then the connections get their turn

bool same_endpoint(const Address& a, const Address& b) { return a.same_host(b) && a.port() == b.port(); }
}  // namespace

Path* Paths::join(uint64_t end, PathUser* user, int slot, int rail, const Address& remote, const std::string& key, double now) {
  const std::string name = std::to_string(rail) + " " + remote.host() + " " + std::to_string(remote.port()) + " " + key;
  std::unique_ptr<Path>& path = paths_[name];
  if (path == nullptr) path.reset(new Path(rail, remote, key, options_, now));
  path->seats_.push_back({end, user, slot});
  ++path->seated_;
  path->turns_.join(end);
  return path.get();
}

void Paths::leave(Path* path, uint64_t end) {
  const auto seat = std::find_if(path->seats_.begin(), path->seats_.end(),
                                 [&](const Path::Seat& s) { return s.end == end && s.user != nullptr; });
  if (seat == path->seats_.end()) return;
  path->turns_.leave(end);
  --path->seated_;
  seat->user = nullptr;
  if (path->busy_ > 0) return;
  *seat = path->seats_.back();
  path->seats_.pop_back();
}

// What is done for one link may end another one, or connect one.
template <typename Do>
void Paths::for_each_seat(Path& path, Do act) {
  ++path.busy_;
  const size_t n = path.seats_.size();
  for (size_t i = 0; i < n; ++i) {
    const Path::Seat seat = path.seats_[i];
    if (seat.user != nullptr) act(seat);
  }
  if (--path.busy_ == 0) std::erase_if(path.seats_, [](const Path::Seat& s) { return s.user == nullptr; });
}

void Paths::tick(double now) {
  for (auto it = paths_.begin(); it != paths_.end();) {
    Path& path = *it->second;
    if (path.seated_ == 0) {
      it = paths_.erase(it);
      continue;
    }
    if (const std::vector<uint64_t> ends = path.turns_.next(now); !ends.empty()) {
      Beat ping;
      ping.kind = BeatKind::ping;
      ping.seq = ++pings_;
      ping.time_ms = now;
      for (const uint64_t end : ends) ping.tags[ping.count++] = other_end(end);
      send(path.rail_, path.remote_, ping, path.key_);
    }
    ++it;
  }
}

bool Paths::send_own_ping(int rail, const Address& to, uint64_t end, const std::string& key, size_t bytes, double now) {
  Beat ping;
  ping.kind = BeatKind::ping;
  ping.flags = kOwnEcho;
  ping.seq = ++pings_;
  ping.time_ms = now;
  ping.tags[ping.count++] = other_end(end);
  return send(rail, to, ping, key, bytes);
}

void Paths::send_goodbye(int rail, const Address& to, uint64_t end, const std::string& key, uint64_t complete, uint8_t flags) {
  Beat bye;
  bye.kind = BeatKind::goodbye;
  bye.flags = flags;
  bye.seq = complete;
  bye.tags[bye.count++] = other_end(end);
  send(rail, to, bye, key);
}

bool Paths::send(int rail, const Address& to, const Beat& beat, const std::string& key, size_t bytes) {
  unsigned char text[Beat::kMost];
  beat.write(text, key);
  const unsigned char* data = text;
  std::vector<unsigned char> padded;
  if (bytes > beat.size()) {
    padded.assign(text, text + beat.size());
    padded.resize(bytes);
    data = padded.data();
  }
  // A rail that cannot send now says so by its silence.
  return ::sendto(udp_(rail), data, std::max(bytes, beat.size()), MSG_NOSIGNAL | MSG_DONTWAIT, to.get(), to.length) >= 0;
}

void Paths::read(int rail, double now) {
  for (int i = 0; i < kMostReads; ++i) {
    unsigned char bytes[Beat::kMost];
    Address from;
    from.length = sizeof from.storage;
    const ssize_t n = ::recvfrom(udp_(rail), bytes, sizeof bytes, MSG_DONTWAIT, from.get(), &from.length);
    if (n < 0) return;
    if (Beat::form(bytes, static_cast<size_t>(n)) == nullptr) take(rail, from, bytes, static_cast<size_t>(n), now);
  }
}

const Paths::End* Paths::find(uint64_t end) const {
  const auto it = ends_.find(end);
  return it == ends_.end() ? nullptr : &it->second;
}

// Whose these bytes are: the key that proves them, and the path if there is one. A beat without a key is nobody's.
Path* Paths::prove(int rail, const Address& from, const unsigned char* bytes, size_t size, Beat* beat, std::string* key) const {
  Path* path = nullptr;
  for (size_t i = 0; i < Beat::claimed_tags(bytes) && path == nullptr; ++i) {
    const End* end = find(Beat::claimed_tag(bytes, i));
    if (end == nullptr) continue;
    *key = end->key;
    path = end->user->path_on(rail);
  }
  if (!key->empty()) {
    if (beat->parse(bytes, size, *key) != nullptr) return key->clear(), nullptr;
    if (path != nullptr) return path;
  }
  for (const auto& [name, p] : paths_) {
    if (p->rail_ != rail || p->seated_ == 0 || !same_endpoint(p->remote_, from)) continue;
    if (key->empty() ? beat->parse(bytes, size, p->key_) != nullptr : p->key_ != *key) continue;
    *key = p->key_;
    return p.get();
  }
  return nullptr;
}

void Paths::take(int rail, const Address& from, const unsigned char* bytes, size_t size, double now) {
  Beat beat;
  std::string key;
  Path* path = prove(rail, from, bytes, size, &beat, &key);
  if (key.empty()) return;
  if (beat.kind == BeatKind::goodbye) {
    if (const End* end = find(beat.tags[0])) end->user->said_goodbye(beat.seq, beat.flags);
    return;
  }
  const bool own = (beat.flags & kOwnEcho) != 0;
  if (beat.kind == BeatKind::ping) answer(rail, from, beat, key, path != nullptr);
  if (path != nullptr) {
    path->turns_.heard(now);
    const uint64_t echo = beat.kind == BeatKind::pong && !own ? beat.seq : 0;
    for_each_seat(*path, [&](const Path::Seat& s) { s.user->path_heard(s.slot, echo, now); });
  }
  if (beat.kind != BeatKind::pong) return;
  if (const End* end = find(beat.tags[0]); own && end != nullptr && end->key == key) end->user->own_echo(rail, beat.seq, now);
  if (path != nullptr && beat.missing != 0) missing(*path, beat, now);
}

void Paths::answer(int rail, const Address& from, const Beat& ping, const std::string& key, bool alive) {
  Beat pong = ping;
  pong.kind = BeatKind::pong;
  pong.missing = 0;
  for (size_t i = 0; i < ping.count; ++i) {
    const End* end = find(ping.tags[i]);
    if (end == nullptr || end->key != key || end->user->misses(rail)) pong.missing |= uint64_t{1} << i;
    pong.tags[i] = other_end(ping.tags[i]);
  }
  // Datagrams alone prove too little: only a path with a connection is alive, and says so.
  if (alive || pong.missing != 0) send(rail, from, pong, key);
}

void Paths::missing(Path& path, const Beat& pong, double now) {
  path.turns_.round();  // whatever took that connection may have taken others
  std::vector<uint64_t> ends;
  for (size_t i = 0; i < pong.count; ++i) {
    if ((pong.missing >> i & 1) != 0) ends.push_back(pong.tags[i]);
  }
  for_each_seat(path, [&](const Path::Seat& s) {
    if (std::find(ends.begin(), ends.end(), s.end) == ends.end()) return;
    s.user->missing_there(s.slot, pong.seq, pong.time_ms, now);
  });
}

}  // namespace ftar
