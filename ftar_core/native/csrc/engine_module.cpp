// The Python face of the engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "engine.h"
#include "module.h"

namespace ftar {

namespace {

nb::object field(nb::handle member, const char* key) {
  if (!nb::isinstance<nb::dict>(member)) throw nb::value_error("a member must be a dict with name, incarnation and rails");
  nb::dict d = nb::borrow<nb::dict>(member);
  if (!d.contains(key)) throw nb::value_error((std::string("a member lacks '") + key + "'").c_str());
  return d[key];
}

template <typename T>
T cast(nb::handle value, const char* what) {
  T out;
  if (!nb::try_cast<T>(value, out)) throw nb::value_error(what);
  return out;
}

using RailTuple = std::tuple<std::string, std::string, int>;

std::vector<Member> members_of(const nb::list& list) {
  std::vector<Member> out;
  for (nb::handle h : list) {
    Member m;
    m.name = cast<std::string>(field(h, "name"), "a member's name must be a string");
    m.incarnation = cast<uint64_t>(field(h, "incarnation"), "a member's incarnation must be a number of at least 0");
    nb::object rails = field(h, "rails");
    for (auto& [rail, address, port] :
         cast<std::vector<RailTuple>>(rails, "a member's rails must be a list of (rail, address, port)")) {
      m.rails.push_back({rail, address, port});
    }
    out.push_back(std::move(m));
  }
  return out;
}

struct Buffers {
  const void* src;
  void* dst;
  DType dtype;
};

Buffers buffers(uint64_t src, uint64_t dst, uint64_t count, int dtype) {
  const DType d = dtype_of(dtype);
  const Buffers b{memory(src, count), const_cast<void*>(memory(dst, count)), d};
  if (count > (uint64_t{1} << 48)) throw nb::value_error("count is too large");
  const uint64_t bytes = count * element_bytes(d);
  if (src < dst + bytes && dst < src + bytes) throw nb::value_error("src and dst overlap");
  return b;
}

nb::dict to_dict(const Event& e) {
  nb::dict d;
  d["type"] = e.type;
  d["epoch"] = nb::bytes(e.epoch.data(), e.epoch.size());
  d["time"] = e.time_s;
  if (e.type == "reduced" || e.type == "failed") {
    d["step"] = e.step;
    d["bucket"] = e.bucket;
  }
  if (!e.peer.empty()) d["peer"] = e.peer;
  if (e.type == "rail") {
    d["rail"] = e.rail;
    d["direction"] = e.direction;
    d["state"] = e.state;
    d["active"] = e.active;
    d["detect_ms"] = e.detect_ms < 0 ? nb::none() : nb::object(nb::float_(e.detect_ms));
  }
  if (e.type != "ready" && e.type != "reduced") d["reason"] = e.reason;
  return d;
}

nb::dict to_dict(const LinkStat& s) {
  nb::dict d;
  d["peer"] = s.peer;
  d["rail"] = s.rail;
  d["direction"] = s.direction;
  d["state"] = s.state;
  d["active"] = s.active;
  d["reason"] = s.reason;
  d["since_s"] = s.since_s;
  d["flaps"] = s.flaps;
  d["resumes"] = s.resumes;
  d["bytes"] = s.bytes;
  d["hold_left_ms"] = s.hold_left_ms;
  return d;
}

template <typename T>
nb::list to_list(const std::vector<T>& items) {
  nb::list out;
  for (const T& item : items) out.append(to_dict(item));
  return out;
}

}  // namespace

void bind_engine(nb::module_& m) {
  using Rails = std::vector<std::tuple<std::string, std::string, std::string>>;
  const auto nogil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, std::string job, nb::bytes token, std::string name, uint64_t incarnation, const Rails& rails,
             const Options& options) {
            std::vector<RailConfig> configs;
            for (const auto& [rail, device, address] : rails) configs.push_back({rail, device, address});
            new (self) Engine(job, text(token), std::move(name), incarnation, configs, options);
          },
          nb::arg("job"), nb::arg("token"), nb::arg("name"), nb::arg("incarnation"), nb::arg("rails"), nb::arg("options"))
      .def("endpoints",
           [](Engine& self) {
             std::vector<RailTuple> out;
             for (const auto& e : self.endpoints()) out.emplace_back(e.rail, e.address, e.port);
             return out;
           })
      .def("set_incarnation", &Engine::set_incarnation, nb::arg("incarnation"), nogil)
      .def("event_fd", &Engine::event_fd)
      .def("events",
           [](Engine& self) {
             std::vector<Event> events;
             {
               nb::gil_scoped_release release;
               events = self.events();
             }
             return to_list(events);
           })
      .def(
          "prepare",
          [](Engine& self, nb::bytes epoch, const nb::list& members, int me) {
            std::vector<Member> list = members_of(members);
            const std::string key = text(epoch);
            nb::gil_scoped_release release;
            self.prepare(key, std::move(list), me);
          },
          nb::arg("epoch"), nb::arg("members"), nb::arg("me"))
      .def(
          "activate",
          [](Engine& self, nb::bytes epoch) {
            const std::string key = text(epoch);
            nb::gil_scoped_release release;
            self.activate(key);
          },
          nb::arg("epoch"))
      .def(
          "discard",
          [](Engine& self, nb::bytes epoch) {
            const std::string key = text(epoch);
            nb::gil_scoped_release release;
            self.discard(key);
          },
          nb::arg("epoch"))
      .def(
          "submit",
          [](Engine& self, nb::bytes epoch, uint64_t step, uint32_t bucket, uint64_t src, uint64_t dst, uint64_t count, int dtype,
             bool on_device) {
            const std::string key = text(epoch);
            const Buffers b = buffers(src, dst, count, dtype);
            nb::gil_scoped_release release;
            self.submit(key, step, bucket, b.src, b.dst, count, b.dtype, on_device);
          },
          nb::arg("epoch"), nb::arg("step"), nb::arg("bucket"), nb::arg("src"), nb::arg("dst"), nb::arg("count"),
          nb::arg("dtype"), nb::arg("on_device") = false)
      .def("use_device", &Engine::use_device, nb::arg("device"),
           nb::arg("most_slots") = static_cast<int>(Passage::kMaxSlots), nogil)
      .def(
          "reduce",
          [](Engine& self, nb::bytes epoch, uint64_t step, uint32_t bucket, uint64_t src, uint64_t dst, uint64_t count, int dtype,
             int timeout_ms) -> nb::object {
            const std::string key = text(epoch);
            const Buffers b = buffers(src, dst, count, dtype);
            std::optional<Event> event;
            {
              nb::gil_scoped_release release;
              event = self.reduce(key, step, bucket, b.src, b.dst, count, b.dtype, timeout_ms);
            }
            return event ? nb::object(to_dict(*event)) : nb::none();
          },
          nb::arg("epoch"), nb::arg("step"), nb::arg("bucket"), nb::arg("src"), nb::arg("dst"), nb::arg("count"),
          nb::arg("dtype"), nb::arg("timeout_ms"))
      .def("abort", &Engine::abort, nogil)
      .def("break_at", &Engine::break_at, nb::arg("step"), nb::arg("bucket"), nb::arg("signal"), nogil)
      .def("links",
           [](Engine& self) {
             std::vector<LinkStat> links;
             {
               nb::gil_scoped_release release;
               links = self.links();
             }
             return to_list(links);
           })
      .def("close", &Engine::close, nogil);
}

}  // namespace ftar
