// gemm_lora_up, family wgmma_s8, integer group scales, BF16: tiles of 128 features and more.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __nv_bfloat16;
using namespace sm90a::integer;
const Entries<T, HighTiles> kKernels;
}  // namespace

Status launch_integer_bfloat16_high_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                          cudaStream_t stream) {
    return launch_one_of<T>(HighTiles{}, static_cast<int>(tile) - kFirstHigh, p, multiprocessors, stream);
}

}  // namespace omniw4::gemm
