// What the files of the Python face share: arguments, checked.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "reduce.h"

namespace ftar {

namespace nb = nanobind;

void bind_engine(nb::module_& m);   // engine_module.cpp
void bind_books(nb::module_& m);    // books_module.cpp
void bind_sockets(nb::module_& m);  // sockets_module.cpp
void bind_device(nb::module_& m);   // device_module.cpp

inline std::string text(const nb::bytes& b) { return {b.c_str(), b.size()}; }

inline DType dtype_of(int dtype) {
  if (dtype < 0 || dtype >= kDTypes) throw nb::value_error("dtype is not one of DTYPES");
  return static_cast<DType>(dtype);
}

inline const void* memory(uint64_t address, uint64_t size) {
  if (address == 0 && size != 0) throw nb::value_error("address 0 with a size that is not 0");
  return reinterpret_cast<const void*>(address);
}

}  // namespace ftar
