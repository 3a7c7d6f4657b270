// gemm_lora_up, family wgmma_s8, 4-bit activations, epilogue: swiglu.
#include "gemm_lora_up_sm90a.cuh"

namespace omniw4::gemm {

namespace {
const sm90a::Kernels<4, epilogue::Swiglu> kKernels;
}

Status launch_a4_swiglu_sm90a(const GemmLoraUpParams& p, cudaStream_t stream) {
    return sm90a::launch_dtype<4, epilogue::Swiglu>(p, stream);
}

}  // namespace omniw4::gemm
