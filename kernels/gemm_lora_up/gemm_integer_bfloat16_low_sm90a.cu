// gemm_lora_up, family wgmma_s8, integer group scales, BF16: tiles of 64 features.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __nv_bfloat16;
using namespace sm90a::integer;
const Registration kKernels[] = {entry<T, Tile64x16x4>(), entry<T, Tile64x16x2>(), entry<T, Tile64x32x4>(),
                                 entry<T, Tile64x32x2>(), entry<T, Tile64x48x2>(), entry<T, Tile64x64x2>(),
                                 entry<T, Tile64x96x2>(), entry<T, Tile64x96>()};
}  // namespace

Status launch_integer_bfloat16_low_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                         cudaStream_t stream) {
    switch (tile) {
        case TileChoice::k64x16x4: return launch_tile<T, Tile64x16x4>(p, multiprocessors, stream);
        case TileChoice::k64x16x2: return launch_tile<T, Tile64x16x2>(p, multiprocessors, stream);
        case TileChoice::k64x32x4: return launch_tile<T, Tile64x32x4>(p, multiprocessors, stream);
        case TileChoice::k64x32x2: return launch_tile<T, Tile64x32x2>(p, multiprocessors, stream);
        case TileChoice::k64x48x2: return launch_tile<T, Tile64x48x2>(p, multiprocessors, stream);
        case TileChoice::k64x64x2: return launch_tile<T, Tile64x64x2>(p, multiprocessors, stream);
        case TileChoice::k64x96x2: return launch_tile<T, Tile64x96x2>(p, multiprocessors, stream);
        case TileChoice::k64x96: return launch_tile<T, Tile64x96>(p, multiprocessors, stream);
        default: return Status::kUnsupported;
    }
}

}  // namespace omniw4::gemm
