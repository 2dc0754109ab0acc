// See transfer.h.
#include "transfer.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

namespace ftar::bench {

namespace {
constexpr size_t kMaxMemory = 64u << 20;  // more and larger messages share buffers: their content does not matter here

struct Buffers {
  Buffers(size_t size, int window)
      : bytes(std::max<size_t>(size, 1)), count(std::clamp<size_t>(kMaxMemory / bytes, 1, static_cast<size_t>(window))) {
    for (size_t i = 0; i < count; ++i) {
      auto* p = static_cast<char*>(::operator new(bytes, std::align_val_t{4096}));
      std::memset(p, static_cast<int>(i) + 1, bytes);
      all.emplace_back(p);
    }
  }
  char* of(uint64_t message) const { return all[message % count].get(); }
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{4096}); }
  };
  size_t bytes;
  size_t count;
  std::vector<std::unique_ptr<char, Free>> all;
};

// A loop that found nothing to do lets others run, as NCCL's does, and gives up in the end.
class Idle {
 public:
  explicit Idle(double patience_s) : patience_ns_(static_cast<int64_t>(patience_s * 1e9)) {}
  void moved() { since_ns_ = 0; }
  void wait() {
    ::sched_yield();
    if (++passes_ % 256 != 0) return;
    const int64_t now = now_ns();
    if (since_ns_ == 0) since_ns_ = now;
    if (now - since_ns_ > patience_ns_) throw std::runtime_error("nothing has moved for " + std::to_string(patience_ns_ / 1000000000) + " s");
  }

 private:
  const int64_t patience_ns_;
  int64_t since_ns_ = 0;
  uint64_t passes_ = 0;
};

template <typename Post>
Span many(Channel& channel, uint64_t count, int window, double patience_s, Post&& post) {
  std::vector<void*> requests(static_cast<size_t>(window));
  Idle idle(patience_s);
  uint64_t posted = 0;
  uint64_t done = 0;
  const auto slots = static_cast<uint64_t>(window);
  Span span{now_ns(), 0};
  while (done < count) {
    bool moved = false;
    while (posted < count && posted - done < slots) {
      void* request = post(posted);
      if (request == nullptr) break;
      requests[posted++ % slots] = request;
      moved = true;
    }
    size_t bytes = 0;
    while (done < posted && channel.test(requests[done % slots], &bytes)) {
      ++done;
      moved = true;
    }
    moved ? idle.moved() : idle.wait();
  }
  span.end_ns = now_ns();
  return span;
}

void complete(Channel& channel, void* request, Idle& idle) {
  size_t bytes = 0;
  while (!channel.test(request, &bytes)) idle.wait();
  idle.moved();
}

template <typename Post>
void* posted(Post&& post, Idle& idle) {
  for (;;) {
    if (void* request = post()) return request;
    idle.wait();
  }
}
}  // namespace

Span send_many(Channel& channel, size_t bytes, uint64_t count, int window, double patience_s) {
  const Buffers buffers(bytes, window);
  return many(channel, count, window, patience_s, [&](uint64_t i) { return channel.isend(buffers.of(i), bytes); });
}

Span receive_many(Channel& channel, size_t bytes, uint64_t count, int window, double patience_s) {
  const Buffers buffers(bytes, window);
  return many(channel, count, window, patience_s, [&](uint64_t i) { return channel.irecv(buffers.of(i), bytes); });
}

Span ping_pong(Channel& out, Channel& into, size_t bytes, uint64_t count, bool first, double patience_s) {
  const Buffers buffers(bytes, 2);
  Idle idle(patience_s);
  char* sent = buffers.of(0);
  char* got = buffers.of(1);
  Span span{now_ns(), 0};
  for (uint64_t i = 0; i < count; ++i) {
    void* receive = posted([&] { return into.irecv(got, bytes); }, idle);
    if (!first) complete(into, receive, idle);
    void* send = posted([&] { return out.isend(sent, bytes); }, idle);
    if (first) complete(into, receive, idle);
    complete(out, send, idle);
  }
  span.end_ns = now_ns();
  return span;
}

}  // namespace ftar::bench
