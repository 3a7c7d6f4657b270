// gemm_lora_up, family mma_s4, epilogue: SwiGLU over interleaved gate and up columns.
#include "gemm_lora_up_s4_sm80.cuh"

namespace omniw4::gemm {

namespace {
const s4::Kernels<epilogue::Swiglu, s4::SmallTile> kKernels;
}

Status launch_s4_swiglu_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return s4::launch_policy<epilogue::Swiglu, s4::SmallTile>(p, stream);
}

}  // namespace omniw4::gemm
