// The Python face of a link's two books (outbox.h, inbox.h), of the scheduler (stripe.h) and of the turns of heartbeats
// (beat_turns.h), for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "beat_turns.h"
#include "inbox.h"
#include "module.h"
#include "outbox.h"
#include "stripe.h"

namespace ftar {

namespace {

using Frame = std::tuple<uint32_t, uint64_t, uint64_t, uint32_t, uint64_t, uint64_t>;  // generation, seq, offset, length, total, address

// place(seq, total) -> address or None.
class PyInbox final : public RecvSink {
 public:
  PyInbox(size_t rails, nb::callable place, uint64_t unposted_bytes)
      : place_(std::move(place)), inbox_(*this, rails, Shelf(held_, unposted_bytes)) {}

  Placement place(const FrameHeader& message) override {
    const nb::object at = place_(message.seq, message.total);
    if (at.is_none()) return {Placement::Kind::later, nullptr, nullptr};
    return {Placement::Kind::here, reinterpret_cast<std::byte*>(nb::cast<uint64_t>(at)), nullptr};
  }
  void received(const FrameHeader&) override {}
  Inbox& inbox() { return inbox_; }

 private:
  nb::callable place_;
  std::atomic<uint64_t> held_{0};
  Inbox inbox_;
};

FrameHeader question(uint32_t generation, uint32_t keep_from, uint64_t window) {
  FrameHeader h;
  h.generation = generation;
  h.step = keep_from;
  h.total = window;
  return h;
}

std::string said(const char* error) { return error == nullptr ? "" : error; }

}  // namespace

void bind_books(nb::module_& m) {
  m.def(
      "stripe_share",
      [](const std::vector<std::tuple<double, uint64_t>>& loads, int rail, uint64_t queued, uint64_t piece) {
        std::vector<RailLoad> rails;
        for (const auto& [rate, backlog] : loads) rails.push_back({rate, backlog});
        if (rail < 0 || static_cast<size_t>(rail) >= rails.size()) throw nb::index_error("no such rail");
        return stripe_share(rails, rail, queued, piece);
      },
      nb::arg("loads"), nb::arg("rail"), nb::arg("queued"), nb::arg("piece"));
  nb::class_<RateMeter>(m, "RateMeter")
      .def(nb::init<>())
      .def("sample", &RateMeter::sample, nb::arg("acknowledged_bytes"), nb::arg("busy_ms"))
      .def("doubt", &RateMeter::doubt)
      .def("rate", &RateMeter::rate);
  nb::class_<BeatTurns>(m, "BeatTurns")
      .def(nb::init<const Options&, size_t, double>(), nb::arg("options"), nb::arg("most_ends"), nb::arg("now_ms"))
      .def("join", &BeatTurns::join, nb::arg("end"))
      .def("leave", &BeatTurns::leave, nb::arg("end"))
      .def("heard", &BeatTurns::heard, nb::arg("now_ms"))
      .def("round", &BeatTurns::round)
      .def("hurry", &BeatTurns::hurry, nb::arg("interval_ms"))
      .def("next", &BeatTurns::next, nb::arg("now_ms"));
  nb::class_<Outbox>(m, "Outbox")
      .def(nb::init<size_t, uint64_t>(), nb::arg("rails"), nb::arg("window_bytes"))
      .def(
          "push",
          [](Outbox& self, uint64_t address, uint64_t bytes) {
            OutMessage message;
            message.data = reinterpret_cast<const std::byte*>(address);
            message.bytes = bytes;
            self.push(std::move(message));
          },
          nb::arg("address"), nb::arg("bytes"))
      .def("opened", &Outbox::opened, nb::arg("rail"))
      .def("closed", &Outbox::closed, nb::arg("rail"))
      .def("keep_from", &Outbox::keep_from, nb::arg("rail"))
      .def(
          "next",
          [](Outbox& self, int rail, uint64_t most) -> std::optional<Frame> {
            FrameHeader h;
            const std::byte* payload = nullptr;
            if (!self.next(rail, most, &h, &payload)) return std::nullopt;
            return Frame{h.generation, h.seq, h.offset, h.length, h.total, reinterpret_cast<uint64_t>(payload)};
          },
          nb::arg("rail"), nb::arg("most"))
      .def("questions",
           [](const Outbox& self) {
             std::vector<std::tuple<int, uint32_t>> out;
             for (const Outbox::Question& q : self.questions()) out.emplace_back(q.rail, q.generation);
             return out;
           })
      .def(
          "acknowledged",
          [](Outbox& self, uint64_t seq) {
            OutMessage done;
            uint64_t count = 0;
            while (self.complete(seq, &done)) ++count;
            return count;
          },
          nb::arg("seq"))
      .def(
          "answered",
          [](Outbox& self, uint32_t generation, uint64_t frames, uint64_t bytes) {
            FrameHeader h;
            h.generation = generation;
            h.total = frames;
            h.offset = bytes;
            return self.answered(h);
          },
          nb::arg("generation"), nb::arg("frames"), nb::arg("bytes"));
  nb::class_<PyInbox>(m, "Inbox")
      .def(nb::init<size_t, nb::callable, uint64_t>(), nb::arg("rails"), nb::arg("place"), nb::arg("unposted_bytes") = uint64_t{1} << 30)
      .def(
          "opened",
          [](PyInbox& self, int rail, uint32_t generation, uint32_t keep_from, uint64_t window) {
            return said(self.inbox().opened(rail, question(generation, keep_from, window)));
          },
          nb::arg("rail"), nb::arg("generation"), nb::arg("keep_from"), nb::arg("window"))
      .def(
          "begins",
          [](PyInbox& self, int rail, const Frame& frame) -> std::tuple<std::optional<uint64_t>, std::string> {
            FrameHeader h;
            std::tie(h.generation, h.seq, h.offset, h.length, h.total, std::ignore) = frame;
            const Placement p = self.inbox().begins(rail, h);
            if (p.kind != Placement::Kind::here) return {std::nullopt, said(p.reason)};
            return {reinterpret_cast<uint64_t>(p.into), ""};
          },
          nb::arg("rail"), nb::arg("frame"))
      .def("arrived", [](PyInbox& self, int rail, size_t bytes) { self.inbox().arrived(rail, bytes); }, nb::arg("rail"),
           nb::arg("bytes"))
      .def("complete", [](PyInbox& self, int rail) { self.inbox().complete(rail); }, nb::arg("rail"))
      .def("closed", [](PyInbox& self, int rail) { self.inbox().closed(rail); }, nb::arg("rail"))
      .def("generation", [](PyInbox& self, int rail) { return self.inbox().generation(rail); }, nb::arg("rail"))
      .def(
          "lost",
          [](PyInbox& self, int rail, uint32_t generation, uint32_t keep_from) {
            FrameHeader have;
            self.inbox().lost(rail, question(generation, keep_from, 0), &have);
            return std::tuple<uint64_t, uint64_t, uint64_t>{have.total, have.offset, have.seq};
          },
          nb::arg("rail"), nb::arg("generation"), nb::arg("keep_from"))
      .def("next",
           [](PyInbox& self) -> std::optional<uint64_t> {
             FrameHeader message;
             if (!self.inbox().next(&message)) return std::nullopt;
             return message.seq;
           })
      .def("find_places", [](PyInbox& self) { self.inbox().find_places(); })
      .def("crowded", [](PyInbox& self) { return self.inbox().crowded(); })
      .def("room", [](PyInbox& self) { return self.inbox().room(); })
      .def("stuck", [](PyInbox& self) { return self.inbox().stuck(); })
      .def("waits", [](PyInbox& self) { return self.inbox().waits(); })
      .def("next_seq", [](PyInbox& self) { return self.inbox().next_seq(); })
      .def("fault", [](PyInbox& self) { return self.inbox().fault(); });
}

}  // namespace ftar
