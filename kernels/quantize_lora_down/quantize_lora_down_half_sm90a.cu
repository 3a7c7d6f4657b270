// quantize_lora_down in layout wgmma_s8, FP16.
#include "quantize_lora_down_sm90a.cuh"

namespace omniw4::quantize {

namespace {
const sm90a::Kernels<__half> kKernels;
}

Status launch_half_sm90a(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return sm90a::launch_rank<__half>(p, stream);
}

}  // namespace omniw4::quantize
