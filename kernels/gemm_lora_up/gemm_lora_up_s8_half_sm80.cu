// gemm_lora_up, family mma_s8, FP16.
#include "gemm_lora_up_s8_sm80.cuh"

namespace omniw4::gemm {

namespace {
const s8::Kernels<__half> kKernels;
}

Status launch_s8_half_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return s8::launch_dtype<__half>(p, stream);
}

}  // namespace omniw4::gemm
