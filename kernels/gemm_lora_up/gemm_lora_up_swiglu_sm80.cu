// gemm_lora_up, family mma_s4, epilogue: SwiGLU over interleaved gate and up columns.
#include "gemm_lora_up_sm80.cuh"

namespace omniw4::gemm {

namespace {
const Kernels<epilogue::Swiglu, SmallTile> kKernels;
}

Status launch_swiglu_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return launch_policy<epilogue::Swiglu, SmallTile>(p, stream);
}

}  // namespace omniw4::gemm
