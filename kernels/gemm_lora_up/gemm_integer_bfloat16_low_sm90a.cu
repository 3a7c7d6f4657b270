// gemm_lora_up, family wgmma_s8, integer group scales, BF16: tiles of 64 features.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __nv_bfloat16;
using namespace sm90a::integer;
const Entries<T, LowTiles> kKernels;
}  // namespace

Status launch_integer_bfloat16_low_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                         cudaStream_t stream) {
    return launch_one_of<T>(LowTiles{}, static_cast<int>(tile) - kFirstLow, p, multiprocessors, stream);
}

}  // namespace omniw4::gemm
