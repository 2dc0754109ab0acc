// The Python face of the benchmarks' native part. Contract: ftar_core/bench/_native.pyi. What may wait releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bare.h"
#include "plugin.h"
#include "traffic.h"
#include "transfer.h"

namespace nb = nanobind;
using namespace ftar::bench;

namespace {
using Free = nb::call_guard<nb::gil_scoped_release>;

std::pair<int64_t, int64_t> pair(const Span& s) { return {s.begin_ns, s.end_ns}; }

void check(uint64_t count, int window) {
  if (count < 1 || window < 1 || window > 32) throw std::runtime_error("at least one message, and 1 to 32 in flight");
}
}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Drivers of the benchmarks; see _native.pyi";

  nb::class_<Channel>(m, "Channel").def("close", &Channel::close, Free());
  m.def("socket_channel", [](int fd) -> std::shared_ptr<Channel> { return std::make_shared<SocketChannel>(fd); }, nb::arg("fd"));

  nb::class_<Plugin>(m, "Plugin")
      .def(nb::init<const std::string&, int>(), nb::arg("path"), nb::arg("version"))
      .def("devices", &Plugin::devices)
      .def("listen",
           [](Plugin& p, int device) {
             const auto [listener, handle] = p.listen(device);
             return std::make_pair(listener, nb::bytes(handle.data(), handle.size()));
           },
           nb::arg("device"))
      .def("try_connect",
           [](Plugin& p, int device, const nb::bytes& handle) { return p.try_connect(device, {handle.c_str(), handle.size()}); },
           nb::arg("device"), nb::arg("handle"), nb::keep_alive<0, 1>())
      .def("try_accept", &Plugin::try_accept, nb::arg("listener"), nb::keep_alive<0, 1>())
      .def("close_listen", &Plugin::close_listen, nb::arg("listener"), Free())
      .def("close", &Plugin::close, Free())
      .def_static("log", [] {
        std::vector<std::tuple<int64_t, int, std::string>> out;
        for (LogLine& line : Plugin::take_log()) out.emplace_back(line.ns, line.level, std::move(line.text));
        return out;
      });

  m.def("send_many",
        [](Channel& c, size_t bytes, uint64_t count, int window, double patience_s) {
          check(count, window);
          return pair(send_many(c, bytes, count, window, patience_s));
        },
        nb::arg("channel"), nb::arg("bytes"), nb::arg("count"), nb::arg("window"), nb::arg("patience_s"), Free());
  m.def("receive_many",
        [](Channel& c, size_t bytes, uint64_t count, int window, double patience_s) {
          check(count, window);
          return pair(receive_many(c, bytes, count, window, patience_s));
        },
        nb::arg("channel"), nb::arg("bytes"), nb::arg("count"), nb::arg("window"), nb::arg("patience_s"), Free());
  m.def("ping_pong",
        [](Channel& out, Channel& into, size_t bytes, uint64_t count, bool first, double patience_s) {
          check(count, 1);
          return pair(ping_pong(out, into, bytes, count, first, patience_s));
        },
        nb::arg("out"), nb::arg("into"), nb::arg("bytes"), nb::arg("count"), nb::arg("first"), nb::arg("patience_s"), Free());

  nb::class_<Ring>(m, "Ring")
      .def(nb::init<int, int, int>(), nb::arg("out"), nb::arg("into"), nb::arg("ranks"))
      .def("run",
           [](Ring& ring, uint64_t send, uint64_t receive, size_t bytes) {
             if (send == 0 || receive == 0) throw std::runtime_error("address 0");
             ring.run(reinterpret_cast<const void*>(send), reinterpret_cast<void*>(receive), bytes);
           },
           nb::arg("send"), nb::arg("receive"), nb::arg("bytes"), Free());

  nb::class_<Traffic>(m, "Traffic")
      .def(nb::init<>())
      .def("add", &Traffic::add, nb::arg("channel"), nb::arg("sender"), nb::arg("id"), nb::arg("sizes"), nb::arg("window"),
           nb::keep_alive<1, 2>())
      .def("start", &Traffic::start, Free())
      .def("pause", &Traffic::pause, nb::arg("on"))
      .def("stop", &Traffic::stop, Free())
      .def("error", &Traffic::error)
      .def("state",
           [](const Traffic& t) {
             std::vector<std::tuple<uint64_t, bool, uint64_t, uint64_t, uint64_t, uint64_t, int64_t>> out;
             for (const StreamState& s : t.state()) out.emplace_back(s.id, s.sender, s.posted, s.done, s.bytes, s.wrong, s.last_ns);
             return out;
           })
      .def("gaps",
           [](Traffic& t) {
             std::vector<std::tuple<uint64_t, int64_t, int64_t>> out;
             for (const Gap& g : t.take_gaps()) out.emplace_back(g.stream, g.from_ns, g.to_ns);
             return out;
           })
      .def("record", &Traffic::record, nb::arg("from_ns"), nb::arg("bin_ns"), nb::arg("bins"))
      .def("recorded", &Traffic::recorded);
}
