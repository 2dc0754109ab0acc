// The Python face of the native core. Contract: ftar_core/native/_core.pyi.
#include <nanobind/nanobind.h>

NB_MODULE(_core, m) { m.attr("ABI") = 1; }
