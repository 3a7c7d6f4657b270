// gemm_lora_up, family wgmma_s8, 8-bit activations, epilogue: plain.
#include "gemm_lora_up_sm90a.cuh"

namespace omniw4::gemm {

namespace {
const sm90a::Kernels<8, epilogue::Plain> kKernels;
}

Status launch_a8_plain_sm90a(const GemmLoraUpParams& p, cudaStream_t stream) {
    return sm90a::launch_dtype<8, epilogue::Plain>(p, stream);
}

}  // namespace omniw4::gemm
