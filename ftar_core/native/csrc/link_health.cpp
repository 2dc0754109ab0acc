// See link_health.h.
#include "link_health.h"

#include <algorithm>
#include <cstdio>

namespace ftar {

namespace {

std::string ms(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.0f ms", value);
  return text;
}

bool is_loss(RailEvent e) {
  return e == RailEvent::carrier_lost || e == RailEvent::silent || e == RailEvent::socket_error ||
         e == RailEvent::peer_notice;
}

}  // namespace

const char* name(RailState state) {
  switch (state) {
    case RailState::down:
      return "DOWN";
    case RailState::probing:
      return "PROBING";
    case RailState::hold:
      return "HOLD";
    default:
      return "UP";
  }
}

const char* name(RailEvent event) {
  constexpr const char* kNames[] = {"Retry",      "Connected",   "FirstConnected", "ConnectFailed", "EchoesGood", "HoldOver",
                                    "LastResort", "CarrierLost", "Silent",         "SocketError",   "PeerNotice"};
  return kNames[static_cast<int>(event)];
}

// Whatever is not in this table does not happen: the event is then no news in that state.
const std::vector<RailRow>& rail_table() {
  using S = RailState;
  using E = RailEvent;
  static const std::vector<RailRow> table = {
      {S::down, E::retry, S::probing},           {S::down, E::connected, S::probing},
      {S::probing, E::connected, S::probing},    {S::probing, E::first_connected, S::up},
      {S::probing, E::connect_failed, S::probing}, {S::probing, E::echoes_good, S::hold},
      {S::probing, E::last_resort, S::up},       {S::probing, E::carrier_lost, S::down},
      {S::probing, E::silent, S::down},          {S::probing, E::socket_error, S::down},
      {S::probing, E::peer_notice, S::down},     {S::hold, E::hold_over, S::up},
      {S::hold, E::last_resort, S::up},          {S::hold, E::connected, S::probing},
      {S::hold, E::carrier_lost, S::down},       {S::hold, E::silent, S::down},
      {S::hold, E::socket_error, S::down},       {S::hold, E::peer_notice, S::down},
      {S::up, E::connected, S::probing},         {S::up, E::carrier_lost, S::down},
      {S::up, E::silent, S::down},               {S::up, E::socket_error, S::down},
      {S::up, E::peer_notice, S::down},
  };
  return table;
}

LinkHealth::LinkHealth(int rails, const Options& options, double now_ms)
    : options_(options),
      rails_(static_cast<size_t>(rails)),
      start_ms_(now_ms),
      tick_ms_(now_ms),
      heard_any_ms_(now_ms),
      alive_since_ms_(now_ms) {
  for (Rail& r : rails_) {
    r.verdict.since_ms = now_ms;
    r.heard_ms = r.quiet_from_ms = now_ms;
  }
}

bool LinkHealth::apply(int rail, RailEvent event, std::string reason, double detect_ms, double now_ms) {
  Rail& r = at(rail);
  const RailState from = r.verdict.state;
  const auto& table = rail_table();
  const auto row = std::find_if(table.begin(), table.end(),
                                [&](const RailRow& t) { return t.from == from && t.event == event; });
  if (row == table.end()) return false;
  if (is_loss(event) && (from == RailState::up || from == RailState::hold)) {
    r.verdict.flaps = std::min(r.verdict.flaps + 1, 30);
  }
  r.verdict.state = row->to;
  r.verdict.reason = reason;
  if (row->to == from) return true;
  r.verdict.since_ms = now_ms;
  if (row->to == RailState::up) r.quiet_from_ms = now_ms;  // time in hold-down is no proof
  changes_.push_back({rail, from, row->to, event, std::move(reason), detect_ms});
  return true;
}

void LinkHealth::lose(int rail, RailEvent event, std::string reason, double detect_ms, double now_ms) {
  Rail& r = at(rail);
  r.connection = false;
  r.echoes = 0;
  apply(rail, event, std::move(reason), detect_ms, now_ms);
  last_resort(now_ms);
}

double LinkHealth::heard_before(int rail, double now_ms) const {
  const Rail& r = rails_[static_cast<size_t>(rail)];
  return r.connection ? std::max(0.0, now_ms - r.heard_ms) : -1;
}

void LinkHealth::connecting(int rail, double now_ms) { at(rail).attempt_ms = now_ms; }

void LinkHealth::connected(int rail, double now_ms, const std::string& proof) {
  Rail& r = at(rail);
  const bool first = !r.ever_connected && r.verdict.state == RailState::probing;
  r.connection = true;
  r.ever_connected = true;
  ever_connected_ = true;
  r.echoes = 0;
  heard(rail, now_ms);
  if (first) {
    apply(rail, RailEvent::first_connected, rails_.size() > 1 ? "connected" : "connected; unprotected: the only rail", 0, now_ms);
  } else {
    apply(rail, RailEvent::connected, "a fresh connection; waiting for " + std::to_string(options_.probe_echoes) + " echoes" + proof,
          0, now_ms);
    last_resort(now_ms);
  }
}

void LinkHealth::connect_failed(int rail, const std::string& reason, double now_ms) {
  at(rail).connection = false;
  apply(rail, RailEvent::connect_failed, reason, 0, now_ms);
}

void LinkHealth::closed(int rail, const std::string& reason, double now_ms) {
  lose(rail, RailEvent::socket_error, reason, heard_before(rail, now_ms), now_ms);
}

void LinkHealth::carrier(int rail, bool up, const std::string& reason, double now_ms) {
  Rail& r = at(rail);
  if (up) {
    r.carrier = true;
    r.carrier_seen_ms = now_ms;
    return;
  }
  const bool was = r.carrier;
  r.carrier = false;
  if (was || r.verdict.state != RailState::down) {
    lose(rail, RailEvent::carrier_lost, reason, was && r.carrier_seen_ms >= 0 ? now_ms - r.carrier_seen_ms : -1, now_ms);
  }
}

void LinkHealth::heard(int rail, double now_ms) {
  if (now_ms - heard_any_ms_ >= 2.0 * options_.heartbeat_ms) alive_since_ms_ = now_ms;
  heard_any_ms_ = now_ms;
  at(rail).heard_ms = now_ms;
}

void LinkHealth::echo(int rail, double now_ms) {
  heard(rail, now_ms);
  Rail& r = at(rail);
  if (r.verdict.state != RailState::probing || !r.connection) return;
  if (++r.echoes < options_.probe_echoes) return;
  const int doublings = std::max(0, std::min(r.verdict.flaps - 1, 20));
  const double hold = std::min<double>(options_.hold_down_max_ms, static_cast<double>(options_.hold_down_ms) * (1 << doublings));
  r.verdict.hold_until_ms = now_ms + hold;
  apply(rail, RailEvent::echoes_good,
        std::to_string(r.echoes) + " good echoes; held down for " + ms(hold) + " after " +
            std::to_string(r.verdict.flaps) + (r.verdict.flaps == 1 ? " flap" : " flaps"),
        0, now_ms);
  last_resort(now_ms);
}

void LinkHealth::notice(int rail, const std::string& reason, double now_ms) {
  lose(rail, RailEvent::peer_notice, "the peer says: " + reason, heard_before(rail, now_ms), now_ms);
}

double LinkHealth::silence_ms(const Rail& rail, double now_ms) const {
  return now_ms - std::max(rail.heard_ms, alive_since_ms_);
}

double LinkHealth::heard_for(int rail, double now_ms) const {
  const Rail& r = rails_[static_cast<size_t>(rail)];
  return r.connection && silence_ms(r, now_ms) < limit_ms() ? now_ms - alive_since_ms_ : 0;
}

void LinkHealth::tick(double now_ms) {
  if (now_ms - tick_ms_ >= 2.0 * options_.heartbeat_ms) alive_since_ms_ = now_ms;  // we slept, not they
  tick_ms_ = now_ms;
  for (int i = 0; i < static_cast<int>(rails_.size()); ++i) {
    Rail& r = at(i);
    if (r.verdict.state == RailState::down) {
      if (r.carrier && now_ms - r.verdict.since_ms >= options_.probe_interval_ms) {
        apply(i, RailEvent::retry, "trying a fresh connection after: " + r.verdict.reason, 0, now_ms);
      }
      continue;
    }
    if (r.connection && silence_ms(r, now_ms) >= limit_ms()) {
      const bool peer_lives = std::any_of(rails_.begin(), rails_.end(), [&](const Rail& o) {
        return &o != &r && o.connection && now_ms - o.heard_ms <= 1.5 * options_.heartbeat_ms;
      });
      if (peer_lives) {
        lose(i, RailEvent::silent, "silent for " + ms(now_ms - r.heard_ms) + " while the peer is heard on another rail",
             now_ms - r.heard_ms, now_ms);
        continue;
      }
    }
    if (r.verdict.state == RailState::hold && now_ms >= r.verdict.hold_until_ms) {
      apply(i, RailEvent::hold_over, "hold-down is over", 0, now_ms);
    }
    if (r.verdict.state == RailState::up && r.verdict.flaps > 0 &&
        now_ms - r.quiet_from_ms >= std::max(1, options_.hold_down_max_ms)) {
      --r.verdict.flaps;
      r.quiet_from_ms = now_ms;
    }
  }
  last_resort(now_ms);
}

// Nothing is UP: take the best of what has a connection, without waiting for proof or hold-down.
void LinkHealth::last_resort(double now_ms) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(rails_.size()); ++i) {
    const Rail& r = at(i);
    if (r.verdict.state == RailState::up) return;
    if (!r.connection) continue;
    if (r.verdict.state == RailState::hold && (best < 0 || at(best).verdict.state != RailState::hold)) best = i;
    if (r.verdict.state == RailState::probing && best < 0) best = i;
  }
  if (best >= 0) apply(best, RailEvent::last_resort, "taken at once: no other rail works", 0, now_ms);
}

std::vector<RailChange> LinkHealth::take_changes() {
  std::vector<RailChange> out;
  out.swap(changes_);
  return out;
}

int LinkHealth::preferred() const {
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (rails_[i].verdict.state == RailState::up) return static_cast<int>(i);
  }
  return -1;
}

bool LinkHealth::may_connect(int rail, double now_ms) const {
  const Rail& r = rails_[static_cast<size_t>(rail)];
  return r.verdict.state == RailState::probing && r.carrier && !r.connection &&
         now_ms - r.attempt_ms >= options_.probe_interval_ms;
}

LinkHealth::Dead LinkHealth::dead(double now_ms) const {
  double dead_since = start_ms_;
  std::string reasons;
  for (size_t i = 0; i < rails_.size(); ++i) {
    const Rail& r = rails_[i];
    double since = r.verdict.since_ms;
    std::string why = r.verdict.reason;
    if (r.connection && r.verdict.state != RailState::down) {
      if (silence_ms(r, now_ms) < limit_ms()) return {};
      since = std::max(r.heard_ms, alive_since_ms_) + limit_ms();
      why = "silent for " + ms(now_ms - r.heard_ms);
    } else if (r.verdict.state == RailState::probing) {
      // A rail between attempts has been dead since the peer was last heard on it, not since the last attempt.
      since = r.heard_ms;
    }
    dead_since = std::max(dead_since, since);
    reasons += (reasons.empty() ? "" : "; ") + std::string("rail ") + std::to_string(i) + ": " + why;
  }
  return {std::max(0.0, now_ms - dead_since), reasons};
}

double LinkHealth::bound_ms() const {
  return ever_connected_ ? options_.unreachable_ms : std::max(options_.unreachable_ms, options_.handshake_ms);
}

std::string LinkHealth::unreachable(double now_ms) const {
  const Dead found = dead(now_ms);
  if (found.why.empty() || found.ms < bound_ms()) return "";
  return "all rails have been dead for " + ms(found.ms) + " (" + found.why + ")";
}

double LinkHealth::silent_ms(int rail, double now_ms) const {
  const Rail& r = rails_[static_cast<size_t>(rail)];
  const double silence = silence_ms(r, now_ms);
  return r.connection && silence >= std::max(limit_ms(), kSilentMs) ? silence : 0;
}

}  // namespace ftar
