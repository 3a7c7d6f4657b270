// quantize_lora_down, INT4 with integer group scales multiplied in.
#include "quantize_lora_down.cuh"

namespace omniw4::quantize {

namespace {
const Kernels<IntegerBytes> kKernels;
}

Status launch_a4_integer(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return launch_dtype<IntegerBytes>(p, stream);
}

}  // namespace omniw4::quantize
