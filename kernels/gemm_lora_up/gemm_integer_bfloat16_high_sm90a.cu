// gemm_lora_up, family wgmma_s8, integer group scales, BF16: tiles of 128 features and more.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __nv_bfloat16;
using namespace sm90a::integer;
const Registration kKernels[] = {entry<T, Tile128x64x2>(), entry<T, Tile128x96>(),  entry<T, Tile128x128>(),
                                 entry<T, Tile128x176>(),  entry<T, Tile128x192>(), entry<T, Tile192x96>(),
                                 entry<T, Tile192x128>(),  entry<T, Tile192x176>(), entry<T, Tile192x192>()};
}  // namespace

Status launch_integer_bfloat16_high_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                          cudaStream_t stream) {
    switch (tile) {
        case TileChoice::k128x64x2: return launch_tile<T, Tile128x64x2>(p, multiprocessors, stream);
        case TileChoice::k128x96: return launch_tile<T, Tile128x96>(p, multiprocessors, stream);
        case TileChoice::k128x128: return launch_tile<T, Tile128x128>(p, multiprocessors, stream);
        case TileChoice::k128x176: return launch_tile<T, Tile128x176>(p, multiprocessors, stream);
        case TileChoice::k128x192: return launch_tile<T, Tile128x192>(p, multiprocessors, stream);
        case TileChoice::k192x96: return launch_tile<T, Tile192x96>(p, multiprocessors, stream);
        case TileChoice::k192x128: return launch_tile<T, Tile192x128>(p, multiprocessors, stream);
        case TileChoice::k192x176: return launch_tile<T, Tile192x176>(p, multiprocessors, stream);
        case TileChoice::k192x192: return launch_tile<T, Tile192x192>(p, multiprocessors, stream);
        default: return Status::kUnsupported;
    }
}

}  // namespace omniw4::gemm
