// quantize_lora_down, INT4 a (token, group of 64), two codes a byte.
#include "quantize_lora_down.cuh"

namespace omniw4::quantize {

namespace {
const Kernels<Nibbles> kKernels;
}

Status launch_a4(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return launch_dtype<Nibbles>(p, stream);
}

}  // namespace omniw4::quantize
