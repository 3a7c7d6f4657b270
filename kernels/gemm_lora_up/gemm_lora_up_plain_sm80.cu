// gemm_lora_up, family mma_s4, epilogue: store the result as it is.
#include "gemm_lora_up_sm80.cuh"

namespace omniw4::gemm {

namespace {
const Kernels<epilogue::Plain, SmallTile> kKernels;
}

Status launch_plain_sm80(const GemmLoraUpParams& p, cudaStream_t stream) {
    return launch_policy<epilogue::Plain, SmallTile>(p, stream);
}

}  // namespace omniw4::gemm
