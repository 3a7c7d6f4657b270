// quantize_lora_down, activations left in 16 bits.
#include "quantize_lora_down.cuh"

namespace omniw4::quantize {

namespace {
const Kernels<Values> kKernels;
}

Status launch_a16(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return launch_dtype<Values>(p, stream);
}

}  // namespace omniw4::quantize
