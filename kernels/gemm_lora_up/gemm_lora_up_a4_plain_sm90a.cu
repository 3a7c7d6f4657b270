// gemm_lora_up, family wgmma_s8, 4-bit activations, epilogue: plain.
#include "gemm_lora_up_sm90a.cuh"

namespace omniw4::gemm {

namespace {
const sm90a::Kernels<4, epilogue::Plain> kKernels;
}

Status launch_a4_plain_sm90a(const GemmLoraUpParams& p, cudaStream_t stream) {
    return sm90a::launch_dtype<4, epilogue::Plain>(p, stream);
}

}  // namespace omniw4::gemm
