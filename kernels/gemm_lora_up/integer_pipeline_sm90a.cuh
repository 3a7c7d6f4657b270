// Shared memory of the wgmma_s8 GEMM with integer group scales.
#pragma once

#include "integer_tile_sm90a.h"
#include "pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

constexpr int kBlockBytes = kBlockCodes + 64;  // nibbles of 64 features and one group, and their scales, a byte each
constexpr int kSegments = 4;                   // runs of features with low-rank columns of their own

// Offsets in bytes. A stage holds two groups of K or, after the last of them, one step of the low-rank product and, with
// the first step, the scales.
template <class Tile>
struct Plan {
    static constexpr int kRowBlocks = Tile::kRowGroups * Tile::kRowBlocks;

    static constexpr int kTokens = 0;                                         // [tokens][128] int8, swizzled
    static constexpr int kWeights = kTokens + Tile::kTokens * kStageColumns;  // [row block][group][kBlockBytes]
    static constexpr int kGroupsEnd = kWeights + kRowBlocks * 2 * kBlockBytes;

    static constexpr int kSegmentBytes = Tile::kTokens * kLowRankRowBytes;
    static constexpr int kLoraAct = 0;                                                 // [segment] B fragments
    static constexpr int kProjUp = kLoraAct + kSegments * kSegmentBytes;               // A fragments
    static constexpr int kTokenScales = kProjUp + Tile::kFeatures * kLowRankRowBytes;  // [tokens] FP32
    static constexpr int kRowScales = kTokenScales + Tile::kTokens * 4;                // [features] FP32
    static constexpr int kLowRankEnd = kRowScales + Tile::kFeatures * 4;

    static constexpr int kEnd = kGroupsEnd > kLowRankEnd ? kGroupsEnd : kLowRankEnd;
    static constexpr int kStageBytes = (kEnd + 16 + 1023) / 1024 * 1024;  // the swizzle counts rows from 1024 bytes on
    static constexpr int kFull = kStageBytes - 16;                        // barriers sit at the end of their stage
    static constexpr int kEmpty = kStageBytes - 8;

    // Output passes through slices of 16 tokens, two for each row group. Behind them, sums that splits hand over.
    static constexpr int kSliceBytes = 16 * Tile::kRowBlocks * 64 * 4;
    static constexpr int kSumBytes = Tile::kRowBlocks * 64 * Tile::kTokens * 4;  // of one warpgroup
    static constexpr int kSums = 2 * Tile::kRowGroups * kSliceBytes;
    static constexpr int kTail = kSums + Tile::kRowGroups * (Tile::kSplits - 1) * kSumBytes;

    // A block has its share of the multiprocessor's 228 KiB, less what the driver keeps, less 1024 to align the stages.
    static constexpr int kRoom = 228 * 1024 / Tile::kBlocks / 128 * 128 - 1024 - 1024 - kTail;
    static constexpr int kStages = kRoom / kStageBytes < 16 ? kRoom / kStageBytes : 16;
    static constexpr int kBytes = 1024 + kStages * kStageBytes + kTail;
    static_assert(kStages >= 2 * Tile::kSplits + 1);  // consumers hold two at once
};

// Tiles are counted along the tokens first: neighbours share weights in L2. The last tile of features may be cut short.
template <class Tile>
struct Problem : sm90a::Problem<Tile> {
    using Base = sm90a::Problem<Tile>;
    __device__ __forceinline__ int tiles() const {
        return Base::token_tiles() * static_cast<int>(ceil_div(Base::padded_features(), Tile::kFeatures));
    }
    __device__ __forceinline__ int row_blocks(int feature) const {
        return min(Plan<Tile>::kRowBlocks, (Base::padded_features() - feature) / 64);
    }
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
