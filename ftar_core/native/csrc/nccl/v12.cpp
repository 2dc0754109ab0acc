// NCCL from 2.30: translation only.
#include "vnew.h"

extern "C" {
__attribute__((visibility("default"))) ftar::nccl::NetV12 ncclNetPlugin_v12 =
    ftar::nccl::Translate<ftar::nccl::PropertiesV12>::table();
}
