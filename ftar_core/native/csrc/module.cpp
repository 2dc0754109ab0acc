// The Python face of the native core. Contract: ftar_core/native/_core.pyi.
//
// Only translation: arguments are checked here (ValueError with the reason), the work is done below, and what may wait
// releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <system_error>
#include <utility>

#include "crypto.h"
#include "digest.h"
#include "frame.h"
#include "heartbeat.h"
#include "link_health.h"
#include "module.h"
#include "options.h"
#include "reduce.h"

namespace nb = nanobind;
using namespace ftar;

namespace {

// The pure parts, for tests and diagrams.
void bind_pure(nb::module_& m) {
  m.def("rail_table", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> rows;
    for (const RailRow& r : rail_table()) rows.emplace_back(name(r.from), name(r.event), name(r.to));
    return rows;
  });
  m.def(
      "check_frame",
      [](nb::bytes header) -> std::string {
        if (header.size() != FrameHeader::kSize) return "a frame header has 64 bytes";
        const char* error = FrameHeader().parse(reinterpret_cast<const unsigned char*>(header.c_str()));
        return error == nullptr ? "" : error;
      },
      nb::arg("header"));
  m.def(
      "hmac_sha256",
      [](nb::bytes key, nb::bytes data) {
        const Hash h = hmac_sha256(text(key), text(data));
        return nb::bytes(reinterpret_cast<const char*>(h.data()), h.size());
      },
      nb::arg("key"), nb::arg("data"));
  m.def(
      "sum_into",
      [](uint64_t into, uint64_t add, uint64_t count, int dtype) {
        sum_into(const_cast<void*>(memory(into, count)), memory(add, count), count, dtype_of(dtype));
      },
      nb::arg("into"), nb::arg("add"), nb::arg("count"), nb::arg("dtype"));
  const auto rail_arg = nb::arg("rail");
  const auto now = nb::arg("now_ms");
  const auto check = [](const LinkHealth& self, int rail) {
    if (rail < 0 || rail >= self.rails()) throw nb::index_error("no such rail");
  };
  nb::class_<SizeTest>(m, "SizeTest")
      .def(nb::init<>())
      .def("due", &SizeTest::due, nb::arg("now_ms"))
      .def("large_sent", &SizeTest::large_sent, nb::arg("ping"), nb::arg("now_ms"))
      .def("large_back", &SizeTest::large_back, nb::arg("ping"))
      .def("small_back", &SizeTest::small_back, nb::arg("ping"))
      .def("passed", &SizeTest::passed)
      .def("failed", &SizeTest::failed);
  nb::class_<LinkHealth>(m, "LinkHealth")
      .def(
          "__init__",
          [](LinkHealth* self, int rails, const Options& options, double now_ms) {
            if (rails < 1 || rails > 64) throw nb::value_error("a link has 1 to 64 rails");
            new (self) LinkHealth(rails, options, now_ms);
          },
          nb::arg("rails"), nb::arg("options"), now)
      .def("connected", [check](LinkHealth& s, int rail, double t) { check(s, rail), s.connected(rail, t); }, rail_arg, now)
      .def("connect_failed", [check](LinkHealth& s, int rail, const std::string& reason, double t) { check(s, rail), s.connect_failed(rail, reason, t); },
           rail_arg, nb::arg("reason"), now)
      .def("closed", [check](LinkHealth& s, int rail, const std::string& reason, double t) { check(s, rail), s.closed(rail, reason, t); },
           rail_arg, nb::arg("reason"), now)
      .def("carrier", [check](LinkHealth& s, int rail, bool up, const std::string& reason, double t) { check(s, rail), s.carrier(rail, up, reason, t); },
           rail_arg, nb::arg("up"), nb::arg("reason"), now)
      .def("heard", [check](LinkHealth& s, int rail, double t) { check(s, rail), s.heard(rail, t); }, rail_arg, now)
      .def("echo", [check](LinkHealth& s, int rail, double t) { check(s, rail), s.echo(rail, t); }, rail_arg, now)
      .def("notice", [check](LinkHealth& s, int rail, const std::string& reason, double t) { check(s, rail), s.notice(rail, reason, t); },
           rail_arg, nb::arg("reason"), now)
      .def("tick", &LinkHealth::tick, now)
      .def("take_changes",
           [](LinkHealth& self) {
             std::vector<std::tuple<int, std::string, std::string, std::string, double>> out;
             for (const RailChange& c : self.take_changes()) out.emplace_back(c.rail, name(c.event), name(c.to), c.reason, c.detect_ms);
             return out;
           })
      .def("state", [check](const LinkHealth& s, int rail) { return check(s, rail), std::string(name(s.rail(rail).state)); }, rail_arg)
      .def("reason", [check](const LinkHealth& s, int rail) { return check(s, rail), s.rail(rail).reason; }, rail_arg)
      .def("flaps", [check](const LinkHealth& s, int rail) { return check(s, rail), s.rail(rail).flaps; }, rail_arg)
      .def("hold_until_ms", [check](const LinkHealth& s, int rail) { return check(s, rail), s.rail(rail).hold_until_ms; }, rail_arg)
      .def("may_connect", [check](const LinkHealth& s, int rail, double t) { return check(s, rail), s.may_connect(rail, t); }, rail_arg, now)
      .def("connecting", [check](LinkHealth& s, int rail, double t) { check(s, rail), s.connecting(rail, t); }, rail_arg, now)
      .def("preferred", &LinkHealth::preferred)
      .def("unreachable", &LinkHealth::unreachable, now)
      .def("dead", [](const LinkHealth& s, double t) { const auto dead = s.dead(t); return std::make_tuple(dead.ms, dead.why); }, now)
      .def("silent_ms", [check](const LinkHealth& s, int rail, double t) { return check(s, rail), s.silent_ms(rail, t); }, rail_arg, now);
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      // OSError chooses its subclass (PermissionError, ...) by the number.
      nb::object error = nb::borrow(PyExc_OSError)(e.code().value(), e.what());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    }
  });
  m.attr("ABI") = 1;
  nb::dict dtypes;
  dtypes["float32"] = 0;
  dtypes["float64"] = 1;
  dtypes["bfloat16"] = 2;
  dtypes["float16"] = 3;
  dtypes["int32"] = 4;
  dtypes["int64"] = 5;
  m.attr("DTYPES") = dtypes;

  m.def(
      "digest",
      [](uint64_t addr, uint64_t nbytes, uint64_t seed) {
        const void* p = memory(addr, nbytes);
        nb::gil_scoped_release nogil;
        return digest(p, nbytes, seed);
      },
      nb::arg("addr"), nb::arg("nbytes"), nb::arg("seed"));
  m.def(
      "all_finite",
      [](uint64_t addr, uint64_t count, int dtype) {
        const DType d = dtype_of(dtype);
        const void* p = memory(addr, count);
        nb::gil_scoped_release nogil;
        return all_finite(p, count, d);
      },
      nb::arg("addr"), nb::arg("count"), nb::arg("dtype"));

  m.def(
      "quick_digest",
      [](uint64_t addr, uint64_t nbytes, uint64_t seed) {
        const void* p = memory(addr, nbytes);
        nb::gil_scoped_release nogil;
        return quick_digest(p, nbytes, seed);
      },
      nb::arg("addr"), nb::arg("nbytes"), nb::arg("seed"));
  m.def(
      "check",
      [](uint64_t addr, uint64_t count, int dtype, uint64_t seed) {
        const DType d = dtype_of(dtype);
        const void* p = memory(addr, count);
        nb::gil_scoped_release nogil;
        const Checked found = check(p, count, d, seed);
        return std::pair<uint64_t, bool>(found.digest, found.finite);
      },
      nb::arg("addr"), nb::arg("count"), nb::arg("dtype"), nb::arg("seed"));
  m.def(
      "squares",
      [](uint64_t addr, uint64_t count, int dtype) {
        const DType d = dtype_of(dtype);
        const void* p = memory(addr, count);
        nb::gil_scoped_release nogil;
        return squares(p, count, d);
      },
      nb::arg("addr"), nb::arg("count"), nb::arg("dtype"));

  nb::class_<Options>(m, "Options")
      .def(nb::init<>())
      .def_rw("heartbeat_ms", &Options::heartbeat_ms)
      .def_rw("heartbeat_misses", &Options::heartbeat_misses)
      .def_rw("carrier_poll_ms", &Options::carrier_poll_ms)
      .def_rw("hold_down_ms", &Options::hold_down_ms)
      .def_rw("hold_down_max_ms", &Options::hold_down_max_ms)
      .def_rw("probe_echoes", &Options::probe_echoes)
      .def_rw("probe_interval_ms", &Options::probe_interval_ms)
      .def_rw("unreachable_ms", &Options::unreachable_ms)
      .def_rw("handshake_ms", &Options::handshake_ms)
      .def_rw("chunk_bytes", &Options::chunk_bytes)
      .def_rw("window_bytes", &Options::window_bytes)
      .def_rw("unposted_bytes", &Options::unposted_bytes)
      .def_rw("congestion", &Options::congestion)
      .def_rw("mode", &Options::mode);

  nb::class_<Heartbeat>(m, "Heartbeat")
      .def(
          "__init__",
          [](Heartbeat* self, std::string host, int port, nb::bytes cookie, int rank, int interval_ms) {
            new (self) Heartbeat(std::move(host), port, text(cookie), rank, interval_ms);
          },
          nb::arg("host"), nb::arg("port"), nb::arg("cookie"), nb::arg("rank"), nb::arg("interval_ms"))
      .def(
          "progress",
          [](Heartbeat& self, int phase, uint64_t step, uint32_t produced, uint32_t reduced) {
            self.progress(phase, step, produced, reduced);
          },
          nb::arg("phase"), nb::arg("step"), nb::arg("produced"), nb::arg("reduced"))
      .def(
          "retarget",
          [](Heartbeat& self, std::string host, int port, nb::bytes cookie, int interval_ms) {
            self.retarget(std::move(host), port, text(cookie), interval_ms);
          },
          nb::arg("host"), nb::arg("port"), nb::arg("cookie"), nb::arg("interval_ms"))
      .def("budget", &Heartbeat::budget, nb::arg("seconds"))
      .def(
          "gather",
          [](Heartbeat& self, const std::string& host, nb::bytes cookie, int ranks) {
            return self.gather(host, text(cookie), ranks);
          },
          nb::arg("host"), nb::arg("cookie"), nb::arg("ranks"))
      .def("stop", &Heartbeat::stop, nb::call_guard<nb::gil_scoped_release>());
  bind_device(m);
  bind_engine(m);
  bind_pure(m);
  bind_books(m);
  bind_sockets(m);
}
