// What the leader of a replica of several ranks knows of the others' heartbeats, and the summary of it in its own.
//
// Thousands of ranks that each send ten datagrams a second to the coordinator would keep it from everything else, so
// only leaders do; the other ranks beat to their leader. Their datagrams wait in the socket's buffer until the leader's
// heartbeat thread looks, once before each beat of its own: no Python, no thread more, and one look takes them all.
// Format of both: ftar_core/wire/heartbeat.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ftar {

constexpr size_t kBeatBytes = 48;
constexpr size_t kTeamBytes = 32;
constexpr uint8_t kOverdue = 0x80;  // in the byte of the phase: it has lasted longer than its budget

struct RankBeat {
  int64_t heard_ms = -1;  // on the clock of `now_ms`; -1: never
  uint8_t phase = 0;
  uint64_t step = 0;
  uint32_t produced = 0;
  uint32_t reduced = 0;
};

class Gather {
 public:
  // Binds a UDP socket on `host` (an address of this machine, empty: all). `ranks`: of the replica, the leader included.
  // Throws std::invalid_argument, std::runtime_error.
  Gather(const std::string& host, std::string cookie, int ranks);
  ~Gather();
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;

  int port() const { return port_; }
  int ranks() const { return static_cast<int>(table_.size()); }
  // Takes in all datagrams that wait.
  void drain(int64_t now_ms);
  // The summary: who was silent longest, who has produced least (rank 0 as `own` says). False: nobody was heard yet.
  bool summary(unsigned char* out, const RankBeat& own, int64_t now_ms) const;

 private:
  void take(const unsigned char* datagram, size_t bytes, int64_t now_ms);

  int fd_ = -1;
  int port_ = 0;
  std::string cookie_;
  std::vector<RankBeat> table_;  // by rank; that of rank 0 is not used
};

}  // namespace ftar
