// The Python face of devices.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "device.h"
#include "module.h"

namespace ftar {

void bind_device(nb::module_& m) {
  const auto nogil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Device>(m, "Device")
      .def_prop_ro("name", &Device::name)
      .def("failure", &Device::failure)
      .def(
          "check",
          [](Device& self, const std::vector<std::tuple<uint64_t, uint64_t, int, uint64_t>>& areas) {
            std::vector<Device::Area> wanted;
            for (const auto& [address, count, dtype, seed] : areas) {
              memory(address, count);
              wanted.push_back({address, count, dtype_of(dtype), seed});
            }
            std::vector<std::pair<uint64_t, bool>> out;
            const nb::gil_scoped_release release;
            for (const Checked& c : self.check(wanted)) out.emplace_back(c.digest, c.finite);
            return out;
          },
          nb::arg("areas"));
  m.def("host_device", &make_host_device, nogil);
  m.def(
      "cuda_device",
      [](int ordinal, const std::string& library, int timeout_ms) {
        if (timeout_ms < 1) throw nb::value_error("timeout_ms must be at least 1");
        return make_cuda_device(ordinal, library, timeout_ms);
      },
      nb::arg("ordinal"), nb::arg("library") = "libcuda.so.1", nb::arg("timeout_ms") = 60000, nogil);
}

}  // namespace ftar
