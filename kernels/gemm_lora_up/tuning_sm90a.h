// Tiles of the wgmma_s8 GEMM and the choice between them. Tuning lives here, apart from the kernel.
#pragma once

#include <cstdint>

namespace omniw4::gemm::sm90a {

// What a block computes at a time: `warpgroups` consumers of `row_blocks` times 64 output features, by `tokens` tokens.
// Narrow tiles take one consumer, so that two blocks fit a multiprocessor and a small problem spreads over more of them.
template <int warpgroups, int row_blocks, int tokens>
struct Tile {
    static constexpr int kWarpgroups = warpgroups, kRowBlocks = row_blocks, kTokens = tokens;
    static constexpr int kFeatures = warpgroups * row_blocks * 64;
    static constexpr int kThreads = (warpgroups + 1) * 128;  // and a producer
    static constexpr int kBlocks = warpgroups == 1 ? 2 : 1;  // on one multiprocessor
    static_assert(tokens % 16 == 0 && tokens >= 16 && tokens <= 128);
};

using Tile64x16 = Tile<1, 1, 16>;
using Tile64x32 = Tile<1, 1, 32>;
using Tile128x64 = Tile<2, 1, 64>;
using Tile256x64 = Tile<2, 2, 64>;
using Tile128x128 = Tile<2, 1, 128>;

enum class TileChoice : int32_t { kAuto = 0, k64x16, k64x32, k128x64, k256x64, k128x128 };

// Time of a whole tile for one group of K, in arbitrary units, on multiprocessors that are full: the more a tile holds,
// the less a product costs. Estimates after the experiments of docs/hopper.md, to be replaced by measurements.
struct TileCost {
    TileChoice choice;
    int features, tokens, blocks;
    double cost;
};
constexpr TileCost kCosts[] = {
    {TileChoice::k64x16, 64, 16, 2, 0.22},     {TileChoice::k64x32, 64, 32, 2, 0.30},
    {TileChoice::k128x64, 128, 64, 1, 0.62},   {TileChoice::k256x64, 256, 64, 1, 1.06},
    {TileChoice::k128x128, 128, 128, 1, 1.10},
};

// The tile whose waves of blocks cost least; the first in case of a tie. Every tile gives the same bits.
// padded_features is a multiple of 128; a tile of 256 needs a multiple of that.
inline TileChoice choose_tile(int64_t rows, int64_t padded_features, int multiprocessors) {
    TileChoice best = TileChoice::kAuto;
    double least = 0;
    for (const TileCost& tile : kCosts) {
        if (padded_features % tile.features != 0) continue;
        const int64_t tiles = (rows + tile.tokens - 1) / tile.tokens * (padded_features / tile.features);
        const int64_t slots = static_cast<int64_t>(multiprocessors) * tile.blocks;
        const double cost = static_cast<double>((tiles + slots - 1) / slots) * tile.cost;
        if (best == TileChoice::kAuto || cost < least) {
            best = tile.choice;
            least = cost;
        }
    }
    return best;
}

}  // namespace omniw4::gemm::sm90a
