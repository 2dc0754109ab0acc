// With libFuzzer: `fuzz_NAME` finds its first corpus in the folder FTAR_FUZZ_SEEDS, which is written here at the start.
#include <fstream>

#include "fuzz.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  if (const char* folder = std::getenv("FTAR_FUZZ_SEEDS")) {
    int number = 0;
    for (const std::string& seed : fuzz_seeds()) std::ofstream(std::string(folder) + "/seed" + std::to_string(number++)) << seed;
  }
  return 0;
}
