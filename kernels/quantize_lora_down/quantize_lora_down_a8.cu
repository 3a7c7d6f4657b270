// quantize_lora_down, INT8 a token.
#include "quantize_lora_down.cuh"

namespace omniw4::quantize {

namespace {
const Kernels<TokenBytes> kKernels;
}

Status launch_a8(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return launch_dtype<TokenBytes>(p, stream);
}

}  // namespace omniw4::quantize
