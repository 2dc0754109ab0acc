// NCCL 2.28 and 2.29: translation only.
#include "vnew.h"

extern "C" {
__attribute__((visibility("default"))) ftar::nccl::NetV11 ncclNetPlugin_v11 =
    ftar::nccl::Translate<ftar::nccl::PropertiesV11>::table();
}
