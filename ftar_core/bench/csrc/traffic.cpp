// See traffic.h.
#include "traffic.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pattern.h"

namespace ftar::bench {

namespace {
constexpr int64_t kGapNs = 1000000;
constexpr size_t kMaxGaps = 1u << 20;
constexpr size_t kGuard = 64;  // a receive is larger than what comes; what lies behind must stay as it was
}  // namespace

class Traffic::Stream {
 public:
  Stream(Traffic& owner, std::shared_ptr<Channel> channel, bool sender, uint64_t id, std::vector<size_t> sizes, int window)
      : owner_(owner), channel_(std::move(channel)), sender_(sender), id_(id), sizes_(std::move(sizes)), window_(static_cast<uint64_t>(window)) {
    largest_ = *std::max_element(sizes_.begin(), sizes_.end());
    buffers_.assign(window_, std::vector<unsigned char>(largest_ + kGuard, kCleared));
    requests_.resize(window_);
  }

  bool step() {
    const bool began = sender_ ? post_send() : post_receive();
    const uint64_t done = done_.load(std::memory_order_relaxed);
    size_t bytes = 0;
    if (done == posted_.load(std::memory_order_relaxed) || !channel_->test(requests_[done % window_], &bytes)) return began;
    sender_ ? sent(done) : received(done, bytes);
    return true;
  }

  StreamState state() const {
    return {id_, sender_, posted_.load(), done_.load(), bytes_.load(), wrong_.load(), last_ns_.load()};
  }

 private:
  size_t size_of(uint64_t message) const { return sizes_[(message * 7 + id_) % sizes_.size()]; }

  bool post_send() {
    const uint64_t m = posted_.load(std::memory_order_relaxed);
    if (owner_.paused_.load(std::memory_order_relaxed) || m - done_.load(std::memory_order_relaxed) >= window_) return false;
    auto& buffer = buffers_[m % window_];
    if (filled_ != m + 1) {  // a post that is refused is tried again with what is there
      fill(buffer.data(), size_of(m), id_, m);
      filled_ = m + 1;
    }
    return posted(channel_->isend(buffer.data(), size_of(m)), m);
  }

  bool post_receive() {
    const uint64_t m = posted_.load(std::memory_order_relaxed);
    if (m - done_.load(std::memory_order_relaxed) >= window_) return false;
    auto& buffer = buffers_[m % window_];
    if (looked_ != m + 1) {  // cleared when its last message was checked: a byte that came late shows
      if (m >= window_) wrong_ += not_cleared(buffer.data(), size_of(m - window_) + kGuard);
      looked_ = m + 1;
    }
    return posted(channel_->irecv(buffer.data(), largest_ + kGuard / 2), m);
  }

  bool posted(void* request, uint64_t m) {
    if (request == nullptr) return false;
    requests_[m % window_] = request;
    posted_.store(m + 1, std::memory_order_release);
    return true;
  }

  void sent(uint64_t m) {
    // NCCL writes the next chunk here at once; bytes taken from here from now on would be wrong ones.
    std::memset(buffers_[m % window_].data(), kCleared, size_of(m));
    last_ns_ = now_ns();
    bytes_ += size_of(m);
    done_.store(m + 1, std::memory_order_release);
  }

  void received(uint64_t m, size_t bytes) {
    const int64_t now = now_ns();
    owner_.received(id_, last_ns_.load(std::memory_order_relaxed), now, bytes);
    last_ns_ = now;
    auto& buffer = buffers_[m % window_];
    const size_t size = size_of(m);
    if (bytes != size) {
      throw std::runtime_error("stream " + std::to_string(id_) + ": message " + std::to_string(m) + " has " + std::to_string(bytes) +
                               " bytes, not " + std::to_string(size));
    }
    const uint64_t wrong = wrong_bytes(buffer.data(), size, id_, m) + not_cleared(buffer.data() + size, kGuard);
    if (wrong > 0) wrong_ += wrong;
    std::memset(buffer.data(), kCleared, size);
    bytes_ += size;
    done_.store(m + 1, std::memory_order_release);
  }

  Traffic& owner_;
  std::shared_ptr<Channel> channel_;
  const bool sender_;
  const uint64_t id_;
  const std::vector<size_t> sizes_;
  const uint64_t window_;
  size_t largest_ = 0;
  std::vector<std::vector<unsigned char>> buffers_;
  std::vector<void*> requests_;
  uint64_t filled_ = 0;
  uint64_t looked_ = 0;
  std::atomic<uint64_t> posted_{0}, done_{0}, bytes_{0}, wrong_{0};
  std::atomic<int64_t> last_ns_{0};
};

Traffic::Traffic() = default;

Traffic::~Traffic() { stop(); }

void Traffic::add(std::shared_ptr<Channel> channel, bool sender, uint64_t id, std::vector<size_t> sizes, int window) {
  if (thread_.joinable()) throw std::runtime_error("the traffic runs already");
  if (sizes.empty() || window < 1 || window > 32) throw std::runtime_error("a stream needs a size and a window of 1 to 32");
  streams_.push_back(std::make_unique<Stream>(*this, std::move(channel), sender, id, std::move(sizes), window));
}

void Traffic::start() {
  if (thread_.joinable()) throw std::runtime_error("the traffic runs already");
  stopping_ = false;
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "bench-traffic");
}

void Traffic::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void Traffic::run() {
  try {
    while (!stopping_.load(std::memory_order_relaxed)) {
      bool moved = false;
      for (const auto& stream : streams_) moved = stream->step() || moved;
      if (!moved) ::sched_yield();
    }
  } catch (const std::exception& e) {
    std::lock_guard lock(mutex_);
    error_ = e.what();
  }
}

void Traffic::received(uint64_t id, int64_t last_ns, int64_t now, size_t bytes) {
  std::lock_guard lock(mutex_);
  if (last_ns != 0 && now - last_ns > kGapNs && gaps_.size() < kMaxGaps) gaps_.push_back({id, last_ns, now});
  const int64_t bin = (now - record_from_ns_) / bin_ns_;
  if (bin >= 0 && static_cast<size_t>(bin) < bins_.size()) bins_[static_cast<size_t>(bin)] += bytes;
}

std::vector<StreamState> Traffic::state() const {
  std::vector<StreamState> out;
  for (const auto& stream : streams_) out.push_back(stream->state());
  return out;
}

std::string Traffic::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

std::vector<Gap> Traffic::take_gaps() {
  std::lock_guard lock(mutex_);
  std::vector<Gap> taken;
  taken.swap(gaps_);
  return taken;
}

void Traffic::record(int64_t from_ns, int64_t bin_ns, size_t bins) {
  if (bin_ns < 1 || bins > (1u << 22)) throw std::runtime_error("bins are at least 1 ns long, and at most 4 million");
  std::lock_guard lock(mutex_);
  record_from_ns_ = from_ns;
  bin_ns_ = bin_ns;
  bins_.assign(bins, 0);
}

std::vector<uint64_t> Traffic::recorded() const {
  std::lock_guard lock(mutex_);
  return bins_;
}

}  // namespace ftar::bench
