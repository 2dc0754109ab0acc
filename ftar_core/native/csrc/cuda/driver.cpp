// See driver.h.
#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "../device.h"

namespace ftar::cuda {

std::string Driver::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(result, &name) != kSuccess || name == nullptr) return "error " + std::to_string(result);
  if (error_string(result, &text) != kSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

const Driver& load_driver(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Driver>> loaded;
  const std::lock_guard lock(mutex);
  if (const auto it = loaded.find(library); it != loaded.end()) return *it->second;
  void* handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw DeviceError("the CUDA driver cannot be loaded: " + std::string(why != nullptr ? why : library));
  }
  auto driver = std::make_unique<Driver>();
  const auto find = [&](const char* symbol) {
    void* address = ::dlsym(handle, symbol);
    if (address == nullptr) {
      throw DeviceError("the CUDA driver " + library + " has no " + symbol + ": install one of CUDA 10.1 or later");
    }
    return address;
  };
#define FTAR_CUDA_FIND(member, symbol, arguments) driver->member = reinterpret_cast<Result(*) arguments>(find(symbol));
  FTAR_CUDA_FUNCTIONS(FTAR_CUDA_FIND)
#undef FTAR_CUDA_FIND
  return *(loaded[library] = std::move(driver));
}

}  // namespace ftar::cuda
