// Tiles of the wgmma_s8 GEMM with integer group scales: what a block computes at a time.
#pragma once

#include <cstdint>

namespace omniw4::gemm::sm90a::integer {

// `row_groups` times `row_blocks` times 64 output features, by `tokens` tokens. Each row group has `splits` consumer
// warpgroups, which share out K and add up their sums at the end; `blocks` blocks share a multiprocessor. Low tiles for
// few rows spread a small problem over many multiprocessors, and splits hide how long a stage takes one warpgroup; large
// tiles move fewer bytes for each product.
//
// With `cluster` above 1, a cluster of that many blocks computes one tile: each block multiplies a part of K, and then
// finishes its own share of the tokens, whose sums the others send it. A share is a multiple of 16 tokens, so of a narrow
// tile only the first blocks have one.
template <int row_groups, int row_blocks, int tokens, int blocks, int splits, int cluster>
struct Tile {
    static constexpr int kRowGroups = row_groups, kRowBlocks = row_blocks, kTokens = tokens, kBlocks = blocks;
    static constexpr int kSplits = splits, kWarpgroups = row_groups * splits;
    static constexpr int kCluster = cluster;
    static constexpr bool kClusters = cluster > 1;
    static constexpr int kFinishers = tokens / 16 < cluster ? tokens / 16 : cluster;  // blocks that have such a share
    static constexpr int kOwnTokens = tokens / kFinishers;
    static constexpr int kFeatures = row_groups * row_blocks * 64;
    static constexpr int kThreads = (kWarpgroups + 1) * 128;  // and the producers
    // Warps that copy: one the tokens, up to three the weights, a row block or two each.
    static constexpr int kWeightWarps = row_groups * row_blocks < 3 ? row_groups * row_blocks : 3;
    static constexpr int kProducers = 1 + kWeightWarps;

    // Registers a thread once the producers have given up what they do not need. A block has what it was launched with,
    // the launch bounds' share rounded down to a multiple of 8, and no more: a warpgroup that asks for more waits for
    // ever.
    static constexpr int kLaunchRegisters = 65536 / (blocks * kThreads) / 8 * 8;
    static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;
    static constexpr int kShare = ((kWarpgroups + 1) * kLaunchRegisters - kProducerRegisters) / kWarpgroups / 8 * 8;
    static constexpr int kConsumerRegisters = kShare < 240 ? kShare : 240;
    static_assert(kProducerRegisters + kWarpgroups * kConsumerRegisters <= (kWarpgroups + 1) * kLaunchRegisters);

    // Groups whose products are issued as one: two where there is room for two such sets of widened weights.
    static constexpr int kUnit = kConsumerRegisters - row_blocks * (tokens / 2 + 32) >= 72 ? 2 : 1;
    static_assert(tokens % 16 == 0 && tokens >= 16 && tokens <= 256 && kOwnTokens % 16 == 0);
    static_assert(cluster <= 8);  // larger ones are not portable
};

using Tile64x16x4 = Tile<1, 1, 16, 1, 4, 1>;
using Tile64x16x2 = Tile<1, 1, 16, 2, 2, 1>;
using Tile64x32x4 = Tile<1, 1, 32, 1, 4, 1>;
using Tile64x32x2 = Tile<1, 1, 32, 2, 2, 1>;
using Tile64x48x2 = Tile<1, 1, 48, 1, 2, 1>;
using Tile64x64x2 = Tile<1, 1, 64, 2, 2, 1>;
using Tile64x96x2 = Tile<1, 1, 96, 1, 2, 1>;
using Tile64x96 = Tile<1, 1, 96, 2, 1, 1>;
using Tile128x64x2 = Tile<2, 1, 64, 1, 2, 1>;
using Tile128x96 = Tile<2, 1, 96, 1, 1, 1>;
using Tile128x128 = Tile<2, 1, 128, 1, 1, 1>;
using Tile128x176 = Tile<2, 1, 176, 1, 1, 1>;
using Tile128x192 = Tile<2, 1, 192, 1, 1, 1>;
using Tile192x96 = Tile<3, 1, 96, 1, 1, 1>;
using Tile192x128 = Tile<3, 1, 128, 1, 1, 1>;
using Tile192x176 = Tile<3, 1, 176, 1, 1, 1>;
using Tile192x192 = Tile<3, 1, 192, 1, 1, 1>;
using Tile64x16x4c2 = Tile<1, 1, 16, 1, 4, 2>;
using Tile64x16x4c4 = Tile<1, 1, 16, 1, 4, 4>;
using Tile128x64x2c2 = Tile<2, 1, 64, 1, 2, 2>;
using Tile128x128c2 = Tile<2, 1, 128, 1, 1, 2>;

enum class TileChoice : int32_t {
    kAuto = 0,
    k64x16x4,
    k64x16x2,
    k64x32x4,
    k64x32x2,
    k64x48x2,
    k64x64x2,
    k64x96x2,
    k64x96,
    k128x64x2,
    k128x96,
    k128x128,
    k128x176,
    k128x192,
    k192x96,
    k192x128,
    k192x176,
    k192x192,
    k64x16x4c2,
    k64x16x4c4,
    k128x64x2c2,
    k128x128c2,
};

// Tiles that are compiled together, in the order of their numbers.
template <class... Tiles>
struct TileList {
    static constexpr int kCount = sizeof...(Tiles);
};
using LowTiles =
    TileList<Tile64x16x4, Tile64x16x2, Tile64x32x4, Tile64x32x2, Tile64x48x2, Tile64x64x2, Tile64x96x2, Tile64x96>;
using HighTiles = TileList<Tile128x64x2, Tile128x96, Tile128x128, Tile128x176, Tile128x192, Tile192x96, Tile192x128,
                           Tile192x176, Tile192x192>;
using ClusterTiles = TileList<Tile64x16x4c2, Tile64x16x4c4, Tile128x64x2c2, Tile128x128c2>;
constexpr int kFirstLow = 1;
constexpr int kFirstHigh = kFirstLow + LowTiles::kCount;
constexpr int kFirstCluster = kFirstHigh + HighTiles::kCount;
constexpr int kTileChoices = kFirstCluster + ClusterTiles::kCount - 1;

}  // namespace omniw4::gemm::sm90a::integer
