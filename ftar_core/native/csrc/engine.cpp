// See engine.h.
#include "engine.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

namespace ftar {

namespace {
constexpr size_t kMaxParked = 64;
constexpr size_t kMaxOver = 256;
constexpr size_t kMaxPrepared = 16;
constexpr size_t kMaxEvents = 1u << 17;
constexpr double kIdleMs = 1000;

const Options& checked(const Options& options) {
  if (const std::string problem = options.problem(); !problem.empty()) throw std::invalid_argument(problem);
  return options;
}

void check_epoch(const std::string& epoch) {
  if (epoch.size() != 16) {
    throw std::invalid_argument("an epoch's key has 16 bytes, not " + std::to_string(epoch.size()));
  }
}
}  // namespace

Engine::Engine(const std::string& job, const std::string& token, std::string name, uint64_t incarnation,
               const std::vector<RailConfig>& rails, const Options& options)
    : name_(std::move(name)), incarnation_(incarnation), transport_(link_key(token, job), checked(options), rails) {
  if (token.empty()) throw std::invalid_argument("the job token is empty");
  if (name_.empty() || name_.size() > 127) throw std::invalid_argument("the name must have 1 to 127 characters");
  event_fd_ = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  for (const RailConfig& r : rails) polls_carrier_ = polls_carrier_ || !r.device.empty();
  transport_.poll_carriers();
  transport_.on_refused([this](const std::string& host, const std::string& reason) {
    Event e;
    e.type = "refused";
    e.peer = host;
    e.reason = reason;
    emit(std::move(e));
  });
  transport_.status().open({"ring", job, name_});
  transport_.start([this](Conn& conn) { on_proven(conn); }, [this](double now) { return on_tick(now); });
}

Engine::~Engine() {
  if (transport_.forked()) {
    for (auto& [epoch, ring] : rings_) static_cast<void>(ring.release());
    if (passage_) passage_->abandon();
  }
  close();
  if (event_fd_ >= 0) ::close(event_fd_);
}

std::unique_lock<FairMutex> Engine::locked() {
  // Whoever held the lock when the child was made is not there to give it back.
  if (transport_.forked()) throw std::invalid_argument("the engine belongs to the process that this one was forked from");
  return std::unique_lock(transport_.mutex());
}

void Engine::check_open() const {
  if (closed_) throw std::invalid_argument("the engine is closed");
}

std::vector<Member::Endpoint> Engine::endpoints() {
  const auto lock = locked();
  std::vector<Member::Endpoint> out;
  for (const RailPort& p : transport_.ports()) out.push_back({p.config.name, p.address.host(), p.address.port()});
  return out;
}

void Engine::set_incarnation(uint64_t incarnation) {
  const auto lock = locked();
  incarnation_ = incarnation;
}

void Engine::emit(Event event) {
  event.time_s = Transport::now_ms() / 1e3;
  std::lock_guard lock(event_mutex_);
  if (event.type == "reduced" || event.type == "failed") {
    for (Waiter* w : waiters_) {
      if (w->event || w->step != event.step || w->bucket != event.bucket || w->epoch != event.epoch) continue;
      w->event = std::move(event);
      if (w->thread != std::this_thread::get_id()) w->wake();
      return;
    }
  }
  // Nobody reads: keep the latest. A session that is this far behind has lost its job anyway.
  if (events_.size() >= kMaxEvents) events_.pop_front();
  events_.push_back(std::move(event));
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(event_fd_, &one, sizeof one);
}

std::vector<Event> Engine::events() {
  std::lock_guard lock(event_mutex_);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(event_fd_, &count, sizeof count);
  std::vector<Event> out(std::make_move_iterator(events_.begin()), std::make_move_iterator(events_.end()));
  events_.clear();
  return out;
}

void Engine::prepare(const std::string& epoch, std::vector<Member> members, int me) {
  check_epoch(epoch);
  const auto lock = locked();
  check_open();
  if (rings_.contains(epoch)) return;
  if (rings_.size() >= kMaxPrepared) throw std::invalid_argument("16 epochs are prepared already: discard some");
  if (me >= 0 && me < static_cast<int>(members.size())) {
    const Member& self = members[static_cast<size_t>(me)];
    if (self.name != name_) throw std::invalid_argument("member " + std::to_string(me) + " is " + self.name + ", but this engine is " + name_);
    if (self.incarnation != incarnation_) {
      throw std::invalid_argument("the epoch has incarnation " + std::to_string(self.incarnation) + " of " + name_ +
                                  ", but this engine is incarnation " + std::to_string(incarnation_));
    }
  }
  auto ring = std::make_unique<Ring>(transport_, *this, epoch, std::move(members), me);
  Ring& r = *ring;
  rings_[epoch] = std::move(ring);
  std::erase(over_, epoch);
  r.start();
  std::vector<uint64_t> still;
  for (const uint64_t id : parked_) {
    Conn* c = transport_.find(id);
    if (c == nullptr || c->stage() != Conn::Stage::parked) continue;
    if (c->hello().epoch == epoch) {
      r.admit(*c);
    } else {
      still.push_back(id);
    }
  }
  parked_ = std::move(still);
  transport_.wake();
}

void Engine::remember(const std::string& epoch) {
  over_.push_back(epoch);
  if (over_.size() > kMaxOver) over_.pop_front();
}

void Engine::end(const std::string& epoch, const std::string& reason) {
  auto it = rings_.find(epoch);
  if (it == rings_.end()) return;
  it->second->close(reason, true);
  rings_.erase(it);
  remember(epoch);
  if (active_ == epoch) active_.clear();
  wake_waiters();
}

void Engine::activate(const std::string& epoch) {
  check_epoch(epoch);
  const auto lock = locked();
  check_open();
  auto it = rings_.find(epoch);
  if (it == rings_.end()) throw std::invalid_argument("this epoch was never prepared here, or it is over");
  if (active_ == epoch) return;
  if (!active_.empty()) end(active_, "went on to another epoch");
  active_ = epoch;
  it->second->activate();
}

void Engine::discard(const std::string& epoch) {
  check_epoch(epoch);
  const auto lock = locked();
  if (closed_) return;
  if (rings_.contains(epoch)) {
    end(epoch, "the epoch was discarded");
  } else if (std::find(over_.begin(), over_.end(), epoch) == over_.end()) {
    remember(epoch);
  }
}

void Engine::abort() {
  const auto lock = locked();
  if (!closed_ && !active_.empty()) end(std::string(active_), "aborted the epoch");
}

bool Engine::submit_locked(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst,
                           uint64_t count, DType dtype, bool inline_send, bool on_device) {
  check_epoch(epoch);
  check_open();
  if (on_device && passage_ == nullptr) throw std::invalid_argument("this engine has no device: use_device comes first");
  if (epoch != active_) return false;
  Ring& ring = *rings_.at(epoch);
  if (const std::string problem = ring.problem(step, bucket, count, dtype); !problem.empty()) {
    throw std::invalid_argument(problem);
  }
  const DefaultFloatMode mode;
  ring.submit(step, bucket, src, dst, count, dtype, inline_send, on_device ? passage_.get() : nullptr);
  return true;
}

void Engine::use_device(std::shared_ptr<Device> device, int most_slots) {
  const auto lock = locked();
  check_open();
  if (passage_) throw std::invalid_argument("this engine has a device already: " + passage_->device().name());
  if (most_slots < static_cast<int>(Passage::kMinSlots) || most_slots > static_cast<int>(Passage::kMaxSlots)) {
    throw std::invalid_argument("most_slots is " + std::to_string(most_slots) + ", but must be between 4 and 128");
  }
  const auto chunk = static_cast<size_t>(transport_.options().chunk_bytes);
  constexpr size_t kLine = 256;  // what a device likes its copies to begin at
  const size_t slot = (std::max<size_t>(chunk, kSmallBytesOfTwo) + kLine - 1) / kLine * kLine;
  passage_ = std::make_unique<Passage>(std::move(device), slot, static_cast<size_t>(most_slots));
  if (const int fd = passage_->device().fd(); fd >= 0) {
    transport_.on_device(fd, [this] {
      passage_->device().drain_fd();
      if (auto it = rings_.find(active_); it != rings_.end()) it->second->device_news();
    });
  }
}

void Engine::submit(const std::string& epoch, uint64_t step, uint32_t bucket, const void* src, void* dst, uint64_t count,
                    DType dtype, bool on_device) {
  const auto lock = locked();
  if (auto it = rings_.find(active_); carrier_ == nullptr && it != rings_.end()) it->second->take_back();
  submit_locked(epoch, step, bucket, src, dst, count, dtype, false, on_device);
}

std::vector<LinkStat> Engine::links() {
  const auto lock = locked();
  std::vector<LinkStat> out;
  const double now = Transport::now_ms();
  // The active epoch first, then those being prepared.
  for (const bool active : {true, false}) {
    for (const auto& [epoch, ring] : rings_) {
      if ((epoch == active_) != active) continue;
      for (LinkStat& l : ring->links(now)) out.push_back(std::move(l));
    }
  }
  return out;
}

void Engine::break_at(uint64_t step, int64_t bucket, int signal) {
  const auto lock = locked();
  breakpoint = {true, step, bucket, signal};
}

void Engine::close() {
  if (transport_.forked()) return;
  {
    std::lock_guard lock(transport_.mutex());
    if (closed_) return;
    closed_ = true;
    for (const auto& [epoch, ring] : rings_) ring->close("the process ends", false);
    rings_.clear();
    active_.clear();
    wake_waiters();
  }
  transport_.stop();
  std::lock_guard lock(transport_.mutex());
  passage_.reset();  // pinned memory
}

void Engine::on_proven(Conn& conn) {
  const Hello& hello = conn.hello();
  if (hello.to != name_) return conn.refuse("this is " + name_ + ", not " + hello.to);
  if (auto it = rings_.find(hello.epoch); it != rings_.end()) return it->second->admit(conn);
  if (std::find(over_.begin(), over_.end(), hello.epoch) != over_.end()) return conn.refuse("this epoch is over here");
  std::erase_if(parked_, [&](uint64_t id) { return transport_.find(id) == nullptr; });
  if (parked_.size() >= kMaxParked) return conn.refuse("too many connections wait for epochs that are not known here");
  parked_.push_back(conn.id());
  conn.tell_parked();
}

double Engine::on_tick(double now) {
  if (rings_.empty()) return now + kIdleMs;
  const Options& o = transport_.options();
  if (polls_carrier_) transport_.poll_carriers();
  for (const auto& [epoch, ring] : rings_) ring->tick(now);
  const int beat = std::clamp(o.heartbeat_ms / 4, 1, 10);
  return now + std::min({beat, std::max(1, o.probe_interval_ms), polls_carrier_ ? o.carrier_poll_ms : beat});
}

}  // namespace ftar
