// quantize_lora_down in layout wgmma_s8, BF16.
#include "quantize_lora_down_sm90a.cuh"

namespace omniw4::quantize {

namespace {
const sm90a::Kernels<__nv_bfloat16> kKernels;
}

Status launch_bfloat16_sm90a(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return sm90a::launch_rank<__nv_bfloat16>(p, stream);
}

}  // namespace omniw4::quantize
