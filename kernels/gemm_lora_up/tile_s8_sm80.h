// Tiles of the mma_s8 GEMM and the choice between them. Tuning lives here, apart from the kernel.
#pragma once

#include <cstdint>

namespace omniw4::gemm::s8 {

constexpr int kStageGroups = 2;  // groups of K a pipeline stage holds: 128 bytes of a token's row

// features x tokens of the output a block owns, as warps_f x warps_t warps; stages of the pipeline; blocks wanted on one
// multiprocessor, which bounds the registers.
template <int features, int tokens, int warps_f, int warps_t, int stages, int blocks>
struct Tile {
    static constexpr int kFeatures = features, kTokens = tokens, kWarpsF = warps_f, kWarpsT = warps_t;
    static constexpr int kStages = stages, kBlocks = blocks, kThreads = warps_f * warps_t * 32;
    static constexpr int kM16 = features / warps_f / 16, kN8 = tokens / warps_t / 8;  // of one warp
    static constexpr int kPitch = features + 4;  // floats; by the 4 the lanes of a fragment store to 32 banks
    static_assert(kM16 * warps_f * 16 == features && kN8 * warps_t * 8 == tokens && kN8 % 2 == 0);
    static_assert(features % 64 == 0 && tokens * features / 8 % kThreads == 0 && stages >= 3);
};

using LargeTile = Tile<128, 128, 4, 2, 3, 1>;
using MiddleTile = Tile<64, 64, 2, 2, 3, 2>;
using SmallTile = Tile<64, 16, 4, 1, 6, 2>;
using SmallHeadTile = Tile<128, 16, 8, 1, 4, 2>;  // as wide as the widest head

// Tokens of the tile that suits a shape: large where there are tiles for most of a GPU's multiprocessors, small where few
// tokens would leave the middle one half empty. All give the same bits.
inline int choose_tile(int64_t tokens, int64_t features, bool heads) {
    const int64_t most_of_a_gpu = heads ? 40 : 80;  // there is no middle tile for heads
    if (tokens > 64 && (tokens + 127) / 128 * ((features + 127) / 128) >= most_of_a_gpu) return LargeTile::kTokens;
    return tokens > 32 ? MiddleTile::kTokens : SmallTile::kTokens;
}

}  // namespace omniw4::gemm::s8
