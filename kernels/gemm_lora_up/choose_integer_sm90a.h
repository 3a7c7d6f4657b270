// Which tile of the wgmma_s8 GEMM with integer group scales suits a shape: the one whose measured costs add up to the
// shortest time. Every tile gives the same bits.
#pragma once

#include <cstdint>

#include "tuning_integer_sm90a.h"

namespace omniw4::gemm::sm90a::integer {

// Tiles that are computed at a time; 0 where the blocks of a cluster do not fit together.
constexpr int64_t slots_of(const TileCost& tile, int multiprocessors) {
    return static_cast<int64_t>(multiprocessors) * tile.blocks / tile.cluster;
}

// Estimated time in microseconds. Blocks, or clusters, come in waves of as many as fit the multiprocessors; a stage of 128
// columns takes longer the more of them are at work, since they share L2 and what lies behind it. Blocks of a cluster
// share out the stages.
constexpr double estimate(const TileCost& tile, int64_t rows, int64_t padded_features, int columns,
                          int multiprocessors) {
    const int64_t tiles =
        ((rows + tile.tokens - 1) / tile.tokens) * ((padded_features + tile.features - 1) / tile.features);
    const int64_t slots = slots_of(tile, multiprocessors), whole = tiles / slots, rest = tiles % slots;
    const double stages = ((columns + 127) / 128 + tile.cluster - 1) / tile.cluster;
    double time = static_cast<double>(whole) * (tile.wave + stages * tile.stage);
    if (rest > 0) {
        const int64_t last = rest * tile.cluster - 1;  // block
        const double crowd = tile.blocks == 1 ? static_cast<double>(rest) / slots
                                              : static_cast<double>(last / multiprocessors) / (tile.blocks - 1);
        time += tile.wave + stages * (tile.stage_alone + (tile.stage - tile.stage_alone) * crowd);
    }
    return time;
}

// Whether the table has the tiles of a list, from number `first` on.
template <class... Tiles>
constexpr bool has_costs_of(TileList<Tiles...>, int first) {
    bool right = true;
    int number = first;
    const auto same = [&](int features, int tokens, int blocks, int splits, int cluster) {
        const TileCost& cost = kCosts[number - 1];
        right = right && static_cast<int>(cost.choice) == number && cost.features == features &&
                cost.tokens == tokens && cost.blocks == blocks && cost.splits == splits && cost.cluster == cluster;
        ++number;
    };
    (same(Tiles::kFeatures, Tiles::kTokens, Tiles::kBlocks, Tiles::kSplits, Tiles::kCluster), ...);
    return right;
}
static_assert(has_costs_of(LowTiles{}, kFirstLow) && has_costs_of(HighTiles{}, kFirstHigh) &&
              has_costs_of(ClusterTiles{}, kFirstCluster));
static_assert(sizeof(kCosts) / sizeof(kCosts[0]) == kTileChoices);

// The first in case of a tie. padded_features: N rounded up to 128; head_dim: tiles hold whole heads of that many, or 0.
constexpr TileChoice choose_tile(int64_t rows, int64_t padded_features, int columns, int multiprocessors,
                                 int head_dim = 0) {
    TileChoice best = TileChoice::kAuto;
    double least = 0.0;
    for (const TileCost& tile : kCosts) {
        if (head_dim > 0 && tile.features % head_dim != 0) continue;
        if (slots_of(tile, multiprocessors) == 0) continue;
        const double time = estimate(tile, rows, padded_features, columns, multiprocessors);
        if (best == TileChoice::kAuto || time < least) {
            best = tile.choice;
            least = time;
        }
    }
    return best;
}

}  // namespace omniw4::gemm::sm90a::integer
