// Heartbeats. A path is what lies between a rail here and a peer's endpoint, for the links with one key: all links that
// have an open connection there share its heartbeats (beat_turns.h). NCCL opens hundreds of connections between two
// processes, and a datagram for each of them every 50 ms would be work that says one thing hundreds of times.
//
// Every authenticated datagram of a path is a sign of life for all links on it, every pong of the path an echo for those
// that connected before its ping. What is not common: whether the far end of a link has its connection still. A ping
// lists ends (frame.h), and the pong says which of them it does not find. Both ends ping, each in its own time.
//
// A rail that let small packets through and lost large ones proves itself by echoes of that size (kOwnEcho). Those are
// their link's own: lost, they say nothing about the others.
//
// A datagram costs a stranger's hash here only if it names a tag that exists, or comes from a known peer's address.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "beat_turns.h"
#include "frame.h"
#include "netio.h"

namespace ftar {

class Path;

// One end of a link, as its paths see it. `slot` is what it joined with.
class PathUser {
 public:
  virtual ~PathUser() = default;
  virtual Path* path_on(int rail) const = 0;  // nullptr: no open connection there
  virtual bool misses(int rail) const = 0;    // the peer has a connection there that this end does not know
  // echo: the ping that it answers; 0: it is no answer
  virtual void path_heard(int slot, uint64_t echo, double now_ms) = 0;
  virtual void own_echo(int rail, uint64_t ping, double now_ms) = 0;
  virtual void missing_there(int slot, uint64_t ping, double asked_ms, double now_ms) = 0;
  virtual void said_goodbye(uint64_t complete, uint8_t flags) = 0;
};

class Path {
 public:
  void hurry(double interval_ms) { turns_.hurry(interval_ms); }
  const Address& remote() const { return remote_; }

 private:
  friend class Paths;
  struct Seat {
    uint64_t end;
    PathUser* user;  // nullptr: has left
    int slot;
  };
  Path(int rail, const Address& remote, std::string key, const Options& options, double now_ms)
      : rail_(rail), remote_(remote), key_(std::move(key)), turns_(options, Beat::kMaxTags, now_ms) {}
  const int rail_;
  const Address remote_;
  const std::string key_;
  BeatTurns turns_;
  std::vector<Seat> seats_;
  size_t seated_ = 0;
  int busy_ = 0;  // somebody goes through the seats
};

// All of them, with the transport's lock held.
class Paths {
 public:
  using Udp = std::function<int(int rail)>;
  Paths(const Options& options, Udp udp) : options_(options), udp_(std::move(udp)) {}
  Paths(const Paths&) = delete;
  Paths& operator=(const Paths&) = delete;

  void add_end(uint64_t end, const std::string& key, PathUser* user) { ends_[end] = {user, key}; }
  void remove_end(uint64_t end) { ends_.erase(end); }
  Path* join(uint64_t end, PathUser* user, int slot, int rail, const Address& remote, const std::string& key, double now_ms);
  void leave(Path* path, uint64_t end);
  uint64_t next_ping() const { return pings_ + 1; }  // pings from here on are younger than what is now

  void tick(double now_ms);
  void read(int rail, double now_ms);
  bool send_own_ping(int rail, const Address& to, uint64_t end, const std::string& key, size_t bytes, double now_ms);
  void send_goodbye(int rail, const Address& to, uint64_t end, const std::string& key, uint64_t complete, uint8_t flags);

 private:
  struct End {
    PathUser* user;
    std::string key;
  };
  const End* find(uint64_t end) const;
  Path* prove(int rail, const Address& from, const unsigned char* bytes, size_t size, Beat* beat, std::string* key) const;
  void take(int rail, const Address& from, const unsigned char* bytes, size_t size, double now_ms);
  void answer(int rail, const Address& from, const Beat& ping, const std::string& key, bool alive);
  void missing(Path& path, const Beat& pong, double now_ms);
  template <typename Do>
  void for_each_seat(Path& path, Do act);
  // bytes: padded to so many; what is longer than a beat is cut by whoever reads it.
  bool send(int rail, const Address& to, const Beat& beat, const std::string& key, size_t bytes = 0);

  const Options& options_;
  const Udp udp_;
  uint64_t pings_ = 0;
  std::unordered_map<uint64_t, End> ends_;
  std::map<std::string, std::unique_ptr<Path>> paths_;
};

}  // namespace ftar
