// Shared memory of the wgmma_s8 GEMM with integer group scales.
#pragma once

#include "../ptx/cluster.cuh"
#include "integer_tile_sm90a.h"
#include "pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

constexpr int kBlockBytes = kBlockCodes + 64;  // nibbles of 64 features and one group, and their scales, a byte each
constexpr int kSegments = 4;                   // runs of features with low-rank columns of their own

// Offsets in bytes. A stage holds two groups of K; or, after the last of them, one step of the low-rank product and, with
// the first step, the scales; or, after those, a part of the tile on its way out. From the low-rank product on there are
// only the tokens that the block finishes.
template <class Tile>
struct Plan {
    static constexpr int kSplits = Tile::kSplits;
    static constexpr int kRowBlocks = Tile::kRowGroups * Tile::kRowBlocks;
    static constexpr int kOwnTokens = Tile::kOwnTokens;

    static constexpr int kTokens = 0;                                         // [tokens][128] int8, swizzled
    static constexpr int kWeights = kTokens + Tile::kTokens * kStageColumns;  // [row block][group][kBlockBytes]
    static constexpr int kGroupsEnd = kWeights + kRowBlocks * 2 * kBlockBytes;

    static constexpr int kTileSegments = kRowBlocks < kSegments ? kRowBlocks : kSegments;
    static constexpr int kSegmentBytes = kOwnTokens * kLowRankRowBytes;
    static constexpr int kLoraAct = 0;                                                 // [segment] B fragments
    static constexpr int kProjUp = kLoraAct + kTileSegments * kSegmentBytes;           // A fragments
    static constexpr int kTokenScales = kProjUp + Tile::kFeatures * kLowRankRowBytes;  // [tokens] FP32
    static constexpr int kRowScales = kTokenScales + kOwnTokens * 4;                   // [features] FP32
    static constexpr int kLowRankEnd = kRowScales + Tile::kFeatures * 4;

    static constexpr int kEnd = kGroupsEnd > kLowRankEnd ? kGroupsEnd : kLowRankEnd;
    static constexpr int kStageBytes = (kEnd + 1023) / 1024 * 1024;  // the swizzle counts rows from 1024 bytes on

    // [token][feature] of the rounded result. Rows are 16 bytes longer than their features, so that the same columns of
    // eight tokens lie in 32 banks.
    static constexpr int kOutPitch = Tile::kFeatures * 2 + 16;
    static constexpr int kOutFit = kStageBytes / kOutPitch / 16 * 16;
    static constexpr int kOutTokens = kOutFit < kOwnTokens ? kOutFit : kOwnTokens;  // in one stage
    static constexpr int kOutStages = (kOwnTokens + kOutTokens - 1) / kOutTokens;

    // Units are eight tokens; a split finishes kUnits of them, where there are enough. Before that it adds up, over the
    // splits, those same units of each block that finishes tokens: kSharedUnits. Sums are handed over behind the stages:
    // [row group][receiver][sender's turn][unit][thread][4] int32.
    static constexpr int kAllUnits = kOwnTokens / 8;
    static constexpr int kUnits = kAllUnits / kSplits > 0 ? kAllUnits / kSplits : 1;
    static constexpr int kReceivers = kAllUnits / kUnits;
    static constexpr int kSharedUnits = Tile::kFinishers * kUnits;
    static constexpr int kUnitBytes = 128 * 4 * 4;
    static constexpr int kSumBytes = (kSplits - 1) * kSharedUnits * kUnitBytes;  // that one receives
    static constexpr int kSumsBytes = Tile::kRowGroups * kReceivers * kSumBytes;
    // And what comes from the other blocks of a cluster: [row group][receiver][sender's turn][row block][unit][thread][4],
    // with a barrier for each warpgroup.
    static constexpr int kPartBytes = (Tile::kCluster - 1) * Tile::kRowBlocks * kUnits * kUnitBytes;  // that one gets
    static constexpr int kPartsBytes = Tile::kRowGroups * kReceivers * kPartBytes;
    static_assert(kReceivers <= kSplits && kAllUnits % kUnits == 0);

    // A block has its share of the multiprocessor's 228 KiB, less what the driver keeps, less 1024 to align the stages.
    // Stages are a multiple of the splits: each split has its own.
    static constexpr int kMostStages = 16, kBarrierBytes = kMostStages * 16;
    static constexpr int kPartBarrierBytes = Tile::kClusters ? Tile::kWarpgroups * 8 : 0;
    static constexpr int kRoom = 228 * 1024 / Tile::kBlocks / 128 * 128 - 1024 - 1024 - kSumsBytes - kPartsBytes -
                                 kBarrierBytes - kPartBarrierBytes;
    static constexpr int kFit = kRoom / kStageBytes < kMostStages ? kRoom / kStageBytes : kMostStages;
    static constexpr int kStages = kFit / kSplits * kSplits;
    static constexpr int kSums = kStages * kStageBytes;
    static constexpr int kParts = kSums + kSumsBytes;
    static constexpr int kBarriers = kParts + kPartsBytes;           // [stage]: full, empty
    static constexpr int kPartBarriers = kBarriers + kBarrierBytes;  // [warpgroup]
    static constexpr int kBytes = 1024 + kPartBarriers + kPartBarrierBytes;
    static_assert(kStages >= 3 * kSplits);  // consumers hold two at once
    static_assert(kStages > kOutStages);
};

// Where a thread is in the ring of stages. Everyone goes through the same sequence: stages of K in rounds, one for each
// split, then stages for all splits; empty ones fill up the last round of either.
//
// A barrier tells no more than a parity, so who waits must know that the stage's use before is over. A stage of K is one
// split's alone, and its use before was that split's, or everyone's. A stage for all comes behind the point where splits
// hand over their sums, when all of K is through.
template <class Plan>
struct Ring {
    uint32_t base;
    int next = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ uint32_t stage(int i) const { return base + i * Plan::kStageBytes; }
    __device__ __forceinline__ uint32_t full(int i) const { return base + Plan::kBarriers + i * 16; }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(i) + 8; }

    __device__ __forceinline__ void step(int count) {
        next += count;
        if (next == Plan::kStages) {
            next = 0;
            phase ^= 1;
        }
    }
    // The stage that was the next one `count` stages ago.
    __device__ __forceinline__ int ago(int count) const { return next - count + (next < count ? Plan::kStages : 0); }
    __device__ __forceinline__ int next_full() {
        const int i = next;
        ptx::mbarrier_wait(full(i), phase);
        step(1);
        return i;
    }
    // A round's stage of one split.
    __device__ __forceinline__ int next_full(int split) {
        const int i = next + split;
        ptx::mbarrier_wait(full(i), phase);
        step(Plan::kSplits);
        return i;
    }
    __device__ __forceinline__ int next_empty() {
        const int i = next;
        ptx::mbarrier_wait(empty(i), phase ^ 1);
        step(1);
        return i;
    }
    __device__ __forceinline__ bool between_rounds() const { return next % Plan::kSplits == 0; }

    // What a warpgroup gets from the other blocks of its cluster.
    __device__ __forceinline__ uint32_t parts(int receiver) const {
        return base + Plan::kParts + receiver * Plan::kPartBytes;
    }
    __device__ __forceinline__ uint32_t part_barrier(int warpgroup) const {
        return base + Plan::kPartBarriers + warpgroup * 8;
    }
};

// Tiles are counted along the tokens first: neighbours share weights in L2. The last tile of features may be cut short.
//
// A block takes tile after tile; a cluster takes one, its block number `part` the part of K and the tokens of that number.
template <class Tile>
struct Problem : sm90a::Problem<Tile> {
    using Base = sm90a::Problem<Tile>;
    __device__ __forceinline__ int part() const {
        if constexpr (Tile::kClusters) return ptx::cluster_rank();
        return 0;
    }
    __device__ __forceinline__ int first_tile() const {
        if constexpr (Tile::kClusters) return ptx::cluster_index();
        return blockIdx.x;
    }
    // Stages of K are shared out in runs as equal as can be; where there are few, some blocks have none.
    __device__ __forceinline__ int first_stage() const { return first_stage(part()); }
    __device__ __forceinline__ int first_stage(int of_part) const { return Base::stages() * of_part / Tile::kCluster; }
    __device__ __forceinline__ int stages() const {
        if constexpr (Tile::kClusters) return first_stage(part() + 1) - first_stage();
        return Base::stages();
    }
    // Whether this block has tokens to finish, and which is the first.
    __device__ __forceinline__ bool finishes() const {
        return Tile::kFinishers == Tile::kCluster || part() < Tile::kFinishers;
    }
    __device__ __forceinline__ int64_t own_token(int tile) const {
        return Base::first_token(tile) + part() * Tile::kOwnTokens;
    }
    __device__ __forceinline__ int tiles() const {
        return Base::token_tiles() * static_cast<int>(ceil_div(Base::padded_features(), Tile::kFeatures));
    }
    __device__ __forceinline__ int row_blocks(int feature) const {
        return min(Plan<Tile>::kRowBlocks, (Base::padded_features() - feature) / 64);
    }
    __device__ __forceinline__ int rounds() const { return (stages() + Tile::kSplits - 1) / Tile::kSplits; }
    // Which low-rank columns a block of 64 features reads.
    __device__ __forceinline__ int segment(int feature) const {
        int segment = 0;
#pragma unroll
        for (int i = 0; i < kSegments - 1; ++i) segment += feature >= Base::p.segment_ends[i];
        return segment;
    }
    // The scales always come, in a step of their own when R = 0.
    __device__ __forceinline__ int last_stages() const { return max(1, Base::rank_steps()); }
};

}  // namespace omniw4::gemm::sm90a::integer
