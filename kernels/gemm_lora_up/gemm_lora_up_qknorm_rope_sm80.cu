// gemm_lora_up, family mma_s4, epilogue: RMSNorm and rotary embedding of the query and key heads.
#include "gemm_lora_up_sm80.cuh"

namespace omniw4::gemm {

namespace {
const Kernels<epilogue::QkNormRope, SmallHeadTile> kKernels;
}

Status launch_qknorm_rope_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return launch_policy<epilogue::QkNormRope, SmallHeadTile>(p, stream);
}

}  // namespace omniw4::gemm
