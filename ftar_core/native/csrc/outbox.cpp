// See outbox.h.
#include "outbox.h"

#include <algorithm>
#include <tuple>

namespace ftar {

void Outbox::push(OutMessage message) {
  queued_ += message.bytes;
  messages_.push_back(std::move(message));
}

void Outbox::prune(Live& live) {
  while (!live.fragments.empty() && live.fragments.front().seq < base_seq_) {
    live.fragments.pop_front();
    ++live.pruned;
  }
}

bool Outbox::waiting(uint64_t* bytes, uint64_t* head) const {
  const uint64_t at = next_seq_ - base_seq_;
  if (again_.empty() && !(next_offset_ > 0 || may_begin(at))) return false;
  *head = again_.empty() ? messages_[at].bytes - next_offset_ : again_.front().length;
  const uint64_t room = window_ - std::min(window_, in_flight_);
  // What is left of a message that was begun has its place in the window already.
  const uint64_t begun = next_offset_ > 0 ? messages_[at].bytes - next_offset_ : 0;
  *bytes = std::max(*head, std::min(queued_, room + begun + (again_.empty() ? 0 : *head)));
  return true;
}

bool Outbox::next(int rail, uint64_t most, FrameHeader* header, const std::byte** payload) {
  Live& live = live_[static_cast<size_t>(rail)];
  if (live.generation == 0) return false;
  Fragment f;
  if (!again_.empty()) {
    Fragment& missing = again_.front();
    f = missing;
    f.length = std::min(most, f.length);
    missing.offset += f.length;
    missing.length -= f.length;
    if (missing.length == 0) again_.pop_front();
  } else {
    const uint64_t at = next_seq_ - base_seq_;
    if (next_offset_ == 0 && !may_begin(at)) return false;
    const OutMessage& m = messages_[at];
    if (next_offset_ == 0) in_flight_ += weight(m);
    f = {next_seq_, next_offset_, std::min(most, m.bytes - next_offset_)};
    next_offset_ += f.length;
    if (next_offset_ == m.bytes) {
      ++next_seq_;
      next_offset_ = 0;
    }
  }
  queued_ -= f.length;
  prune(live);
  live.fragments.push_back(f);
  const OutMessage& m = messages_[f.seq - base_seq_];
  FrameHeader h;
  h.type = FrameType::data;
  h.flags = m.ack_soon ? kAckSoon : 0;
  h.generation = live.generation;
  h.seq = f.seq;
  h.offset = f.offset;
  h.total = m.bytes;
  h.length = static_cast<uint32_t>(f.length);
  h.step = m.step;
  h.bucket = m.bucket;
  h.part = m.part;
  *header = h;
  *payload = m.data + f.offset;
  return true;
}

uint32_t Outbox::opened(int rail) {
  Live& live = live_[static_cast<size_t>(rail)];
  live = Live{};
  live.generation = ++generation_;
  return live.generation;
}

uint32_t Outbox::closed(int rail) {
  Live& live = live_[static_cast<size_t>(rail)];
  const uint32_t generation = live.generation;
  if (generation == 0) return 0;
  // Without fragments of its own too: it may have carried the acknowledgement of what went elsewhere.
  const bool ask = in_flight();
  if (ask) lost_.push_back({rail, generation, live.pruned, std::move(live.fragments)});
  live = Live{};
  return ask ? generation : 0;
}

bool Outbox::unacknowledged(int rail) const {
  const Live& live = live_[static_cast<size_t>(rail)];
  for (size_t i = live.fragments.size(); i > 0; --i) {
    if (live.fragments[i - 1].seq >= base_seq_) return true;
  }
  return false;
}

std::vector<Outbox::Question> Outbox::questions() const {
  std::vector<Question> out;
  for (const Lost& l : lost_) out.push_back({l.rail, l.generation});
  return out;
}

uint32_t Outbox::keep_from(int rail) const {
  for (const Lost& l : lost_) {  // in the order of generations
    if (l.rail == rail) return l.generation;
  }
  const uint32_t live = live_[static_cast<size_t>(rail)].generation;
  return live != 0 ? live : generation_ + 1;
}

std::string Outbox::answered(const FrameHeader& have) {
  const auto it = std::find_if(lost_.begin(), lost_.end(), [&](const Lost& l) { return l.generation == have.generation; });
  if (it == lost_.end()) return "";
  Lost lost = std::move(*it);
  lost_.erase(it);
  const uint64_t put = lost.pruned + lost.fragments.size();
  const uint64_t frames = have.total;
  uint64_t bytes = have.offset;
  if (frames < lost.pruned || frames > put || (bytes > 0 && frames == put)) return "an answer about frames that were never sent";
  for (uint64_t i = frames - lost.pruned; i < lost.fragments.size(); ++i) {
    Fragment f = lost.fragments[i];
    if (bytes > f.length) return "an answer about bytes that were never sent";
    f.offset += bytes;
    f.length -= bytes;
    const bool arrived = bytes > 0 && f.length == 0;
    bytes = 0;
    if (arrived || f.seq < base_seq_) continue;
    queued_ += f.length;
    again_.push_back(f);
  }
  std::sort(again_.begin(), again_.end(), [](const Fragment& a, const Fragment& b) {
    return std::tie(a.seq, a.offset) < std::tie(b.seq, b.offset);
  });
  return "";
}

bool Outbox::complete(uint64_t seq, OutMessage* done) {
  if (base_seq_ >= std::min(seq, next_seq_)) return false;
  *done = messages_.pop_front();
  ++base_seq_;
  in_flight_ -= std::min(in_flight_, weight(*done));
  // A receiver that asked for bytes again and then says that it has them: nothing of a message that is gone may be sent.
  while (!again_.empty() && again_.front().seq < base_seq_) {
    queued_ -= again_.front().length;
    again_.pop_front();
  }
  return true;
}

}  // namespace ftar
