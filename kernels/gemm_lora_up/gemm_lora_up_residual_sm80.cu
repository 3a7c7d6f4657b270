// gemm_lora_up, family mma_s4, epilogue: add a residual.
#include "gemm_lora_up_sm80.cuh"

namespace omniw4::gemm {

namespace {
const Kernels<epilogue::Residual, SmallTile> kKernels;
}

Status launch_residual_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return launch_policy<epilogue::Residual, SmallTile>(p, stream);
}

}  // namespace omniw4::gemm
