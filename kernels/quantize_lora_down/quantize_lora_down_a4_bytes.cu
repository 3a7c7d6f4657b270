// quantize_lora_down, INT4 a (token, group of 64), a byte each.
#include "quantize_lora_down.cuh"

namespace omniw4::quantize {

namespace {
const Kernels<GroupBytes> kKernels;
}

Status launch_a4_bytes(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return launch_dtype<GroupBytes>(p, stream);
}

}  // namespace omniw4::quantize
