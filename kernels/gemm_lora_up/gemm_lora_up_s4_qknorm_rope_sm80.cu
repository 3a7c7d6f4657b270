// gemm_lora_up, family mma_s4, epilogue: RMSNorm and rotary embedding of the query and key heads.
#include "gemm_lora_up_s4_sm80.cuh"

namespace omniw4::gemm {

namespace {
const s4::Kernels<epilogue::QkNormRope, s4::SmallHeadTile> kKernels;
}

Status launch_s4_qknorm_rope_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return s4::launch_policy<epilogue::QkNormRope, s4::SmallHeadTile>(p, stream);
}

}  // namespace omniw4::gemm
