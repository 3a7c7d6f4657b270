// gemm_lora_up, family wgmma_s8, integer group scales, BF16: tiles whose K a cluster shares out.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __nv_bfloat16;
using namespace sm90a::integer;
const Registration kKernels[] = {entry<T, Tile64x16x4c2>(), entry<T, Tile64x16x4c4>(), entry<T, Tile128x64x2c2>(),
                                 entry<T, Tile128x128c2>()};
}  // namespace

Status launch_integer_bfloat16_cluster_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                             cudaStream_t stream) {
    switch (tile) {
        case TileChoice::k64x16x4c2: return launch_tile<T, Tile64x16x4c2>(p, multiprocessors, stream);
        case TileChoice::k64x16x4c4: return launch_tile<T, Tile64x16x4c4>(p, multiprocessors, stream);
        case TileChoice::k128x64x2c2: return launch_tile<T, Tile128x64x2c2>(p, multiprocessors, stream);
        case TileChoice::k128x128c2: return launch_tile<T, Tile128x128c2>(p, multiprocessors, stream);
        default: return Status::kUnsupported;
    }
}

}  // namespace omniw4::gemm
