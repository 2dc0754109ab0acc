// Is a rail good? One pure machine for all rails of one link: events and `now` in, states with their reason out.
// It owns no socket, clock or thread; tests/native/test_link_health.py walks its table.
//
//          CarrierLost, Silent, SocketError, PeerNotice (from any state)
//        +-------------------------------------------------------------+
//        v                                                             |
//      DOWN --Retry, Connected--> PROBING --EchoesGood--> HOLD --HoldOver, LastResort--> UP
//                                    |  FirstConnected (a new link owes nobody proof)      ^
//                                    +------------------ LastResort -----------------------+
//
// The hard question is what silence means. A rail is DOWN by silence only if the peer is known to live: it was heard on
// another rail within 1.5 intervals while this one was silent for `heartbeat_misses` intervals. All rails silent at once
// is the peer or its host (stopped, swapping, dead), and changing rails would not help: the rails keep their state, and
// when the peer is heard again every rail gets a fresh period, or the first rail to speak would convict the others. The
// same holds if our own thread slept (a late tick). A link with one rail is therefore never DOWN by silence.
//
// Hold-down: a rail that came back stays in HOLD, doubling with every flap, so that a loose cable does not move the
// traffic twice a second; one flap is forgotten per `hold_down_max_ms` of quiet. When no other rail is UP, waiting would
// be silly: the best rail with a connection is taken at once (LastResort). Retries never end.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

namespace ftar {

enum class RailState { down, probing, hold, up };
enum class RailEvent {
  retry,
  connected,
  first_connected,
  connect_failed,
  echoes_good,
  hold_over,
  last_resort,
  carrier_lost,
  silent,
  socket_error,
  peer_notice,
};

const char* name(RailState state);
const char* name(RailEvent event);

struct RailRow {
  RailState from;
  RailEvent event;
  RailState to;
};
const std::vector<RailRow>& rail_table();

struct RailVerdict {
  RailState state = RailState::probing;
  std::string reason = "not connected yet";
  double since_ms = 0;  // when it entered the state
  int flaps = 0;        // losses not yet forgotten
  double hold_until_ms = 0;
};

struct RailChange {
  int rail;
  RailState from;
  RailState to;
  RailEvent event;
  std::string reason;
  double detect_ms;  // from the last sign of life to this verdict; -1: there was none to lose
};

// Do large packets pass on a rail where small ones do? Asked when TCP seems stuck there: packets of its size are sent
// beside the heartbeats, which are small, as RFC 8899 probes a path. There is no time-out in it. All pings share one
// count, and on a way that is slow, full or asleep both kinds are late: small ones that were sent after the last of the
// large ones are answered before any of those only if those were lost. Several, since any packet may be, and a full
// queue that is counted in bytes has room for a small one rather.
class SizeTest {
 public:
  static constexpr int kLarge = 6;
  static constexpr int kSmall = 2;
  static constexpr double kApartMs = 40;
  bool due(double now_ms) const { return sent_ < kLarge && !passed_ && now_ms - sent_ms_ >= kApartMs; }
  void large_sent(uint64_t ping, double now_ms) {
    if (sent_++ == 0) first_ = ping;
    last_ = ping;
    sent_ms_ = now_ms;
  }
  void large_back(uint64_t ping) { passed_ = passed_ || (sent_ > 0 && ping >= first_ && ping <= last_); }
  void small_back(uint64_t ping) { small_ += sent_ == kLarge && ping > last_; }
  bool passed() const { return passed_; }
  bool failed() const { return sent_ == kLarge && !passed_ && small_ >= kSmall; }

 private:
  int sent_ = 0;
  int small_ = 0;  // answered, of those sent after the last large one
  bool passed_ = false;
  uint64_t first_ = 0;
  uint64_t last_ = 0;
  double sent_ms_ = -1e18;
};

class LinkHealth {
 public:
  LinkHealth(int rails, const Options& options, double now_ms);

  // Events. `now_ms` never goes back.
  // A fresh, authenticated connection (the old one is gone). proof: what its echoes have to show, for the reason.
  void connected(int rail, double now_ms, const std::string& proof = "");
  void connect_failed(int rail, const std::string& reason, double now_ms);
  void closed(int rail, const std::string& reason, double now_ms);  // socket error or end of stream
  void carrier(int rail, bool up, const std::string& reason, double now_ms);
  void heard(int rail, double now_ms);  // any byte
  void echo(int rail, double now_ms);   // the answer to one of our probes
  void notice(int rail, const std::string& reason, double now_ms);
  void tick(double now_ms);

  // Verdicts.
  std::vector<RailChange> take_changes();  // since the last call, in order
  const RailVerdict& rail(int rail) const { return rails_[static_cast<size_t>(rail)].verdict; }
  int rails() const { return static_cast<int>(rails_.size()); }
  int preferred() const;                   // the UP rail of the lowest index, or -1
  double heard_for(int rail, double now_ms) const;  // without a gap; 0: it is silent now
  bool may_connect(int rail, double now_ms) const;  // PROBING, no connection, and not tried too recently
  void connecting(int rail, double now_ms);         // an attempt begins
  // All rails are dead (DOWN, without a connection, or silent too long) for so long.
  struct Dead {
    double ms = 0;
    std::string why = {};  // of every rail; empty: some rail works
  };
  Dead dead(double now_ms) const;
  double bound_ms() const;                       // how long a link may be dead before it is unreachable
  std::string unreachable(double now_ms) const;  // non-empty: dead for longer than that
  // Connected, and nothing was heard for so long, at least kSilentMs: for people, who take UP for "it works". 0: it was.
  double silent_ms(int rail, double now_ms) const;

 private:
  static constexpr double kSilentMs = 1000;
  struct Rail {
    RailVerdict verdict;
    bool carrier = true;
    bool connection = false;
    bool ever_connected = false;
    int echoes = 0;
    double heard_ms = 0;
    double carrier_seen_ms = -1;  // never
    double attempt_ms = -1e18;
    double quiet_from_ms = 0;  // flaps decay from here
  };
  Rail& at(int rail) { return rails_[static_cast<size_t>(rail)]; }
  bool apply(int rail, RailEvent event, std::string reason, double detect_ms, double now_ms);
  void lose(int rail, RailEvent event, std::string reason, double detect_ms, double now_ms);
  void last_resort(double now_ms);
  double silence_ms(const Rail& rail, double now_ms) const;
  double heard_before(int rail, double now_ms) const;  // -1: it had no connection
  double limit_ms() const { return static_cast<double>(options_.heartbeat_ms) * options_.heartbeat_misses; }

  Options options_;
  std::vector<Rail> rails_;
  std::vector<RailChange> changes_;
  double start_ms_;
  double tick_ms_;
  double heard_any_ms_;
  double alive_since_ms_;  // the peer (and we) have been awake without a gap since
  bool ever_connected_ = false;
};

}  // namespace ftar
