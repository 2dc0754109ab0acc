// The Python face of the native core. Contract: ftar_core/native/_core.pyi.
//
// Only translation: arguments are checked here (ValueError with the reason), the work is done below, and what may wait
// releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "heartbeat.h"
#include "options.h"
#include "reduce.h"

namespace nb = nanobind;
using namespace ftar;

namespace {

std::string text(const nb::bytes& b) { return {b.c_str(), b.size()}; }

DType dtype_of(int dtype) {
  if (dtype < 0 || dtype >= kDTypes) throw nb::value_error("dtype is not one of DTYPES");
  return static_cast<DType>(dtype);
}

const void* memory(uint64_t address, uint64_t size) {
  if (address == 0 && size != 0) throw nb::value_error("address 0 with a size that is not 0");
  return reinterpret_cast<const void*>(address);
}

}  // namespace

NB_MODULE(_core, m) {
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
      .def_rw("congestion", &Options::congestion);

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
      .def("stop", &Heartbeat::stop, nb::call_guard<nb::gil_scoped_release>());
}
