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
using SmallTile = Tile<64, 16, 4, 1, 6, 2>;
using SmallHeadTile = Tile<128, 16, 8, 1, 4, 2>;  // as wide as the widest head

// Small tiles until the large ones would fill a GPU half way. Both give the same bits.
inline bool prefers_large_tile(int64_t tokens, int64_t features) {
    constexpr int64_t kHalfFull = 40;
    return tokens > 64 && (tokens + 127) / 128 * ((features + 127) / 128) >= kHalfFull;
}

}  // namespace omniw4::gemm::s8
