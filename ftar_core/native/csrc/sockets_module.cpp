// The Python face of sockets.h: buffers are those of Python objects, which stay locked while the call runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "module.h"
#include "sockets.h"

namespace ftar {

namespace {

class Buffers {
 public:
  Buffers(const nb::sequence& objects, int flags) {
    views_.reserve(nb::len(objects));
    for (nb::handle object : objects) {
      Py_buffer view;
      if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) {
        release();
        throw nb::python_error();
      }
      views_.push_back(view);
      spans.push_back({view.buf, static_cast<size_t>(view.len)});
    }
  }
  ~Buffers() { release(); }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  std::vector<Span> spans;

 private:
  void release() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
  }
  std::vector<Py_buffer> views_;
};

}  // namespace

void bind_sockets(nb::module_& m) {
  m.def(
      "receive_into",
      [](int fd, const nb::sequence& buffers) {
        Buffers into(buffers, PyBUF_WRITABLE);
        nb::gil_scoped_release nogil;
        return receive_all(fd, into.spans);
      },
      nb::arg("fd"), nb::arg("buffers"));
  m.def(
      "digest_of",
      [](const nb::sequence& buffers) {
        Buffers of(buffers, PyBUF_SIMPLE);
        nb::gil_scoped_release nogil;
        return digest_all(of.spans);
      },
      nb::arg("buffers"));
  m.def(
      "fan_out",
      [](const std::vector<int>& fds, const nb::bytes& data) {
        const char* bytes = data.c_str();
        const size_t size = data.size();
        nb::gil_scoped_release nogil;
        return fan_out(fds, bytes, size);
      },
      nb::arg("fds"), nb::arg("data"));
  m.def(
      "populate",
      [](uint64_t addr, uint64_t nbytes) {
        void* data = const_cast<void*>(memory(addr, nbytes));
        nb::gil_scoped_release nogil;
        return populate(data, nbytes);
      },
      nb::arg("addr"), nb::arg("nbytes"));
}

}  // namespace ftar
