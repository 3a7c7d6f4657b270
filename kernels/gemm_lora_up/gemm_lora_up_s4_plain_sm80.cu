// gemm_lora_up, family mma_s4, epilogue: store the result as it is.
#include "gemm_lora_up_s4_sm80.cuh"

namespace omniw4::gemm {

namespace {
const s4::Kernels<epilogue::Plain, s4::SmallTile> kKernels;
}

Status launch_s4_plain_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return s4::launch_policy<epilogue::Plain, s4::SmallTile>(p, stream);
}

}  // namespace omniw4::gemm
