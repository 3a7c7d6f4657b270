// gemm_lora_up, family wgmma_s8, 8-bit activations, epilogue: residual.
#include "gemm_lora_up_sm90a.cuh"

namespace omniw4::gemm {

namespace {
const sm90a::Kernels<8, epilogue::Residual> kKernels;
}

Status launch_a8_residual_sm90a(const GemmLoraUpParams& p, cudaStream_t stream) {
    return sm90a::launch_dtype<8, epilogue::Residual>(p, stream);
}

}  // namespace omniw4::gemm
