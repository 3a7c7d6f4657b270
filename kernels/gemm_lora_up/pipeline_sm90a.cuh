// Shared memory of the wgmma_s8 GEMM, and the ring of stages that a producer fills and consumers empty.
#pragma once

#include "../common/fragment.cuh"
#include "../omniw4.h"
#include "../ptx/mbarrier.cuh"
#include "tuning_sm90a.h"

namespace omniw4::gemm::sm90a {

constexpr int kChunkGroups = 8;                    // that consumers unroll
constexpr int kBlockCodes = 64 * kGroup / 2;       // nibbles of 64 features and one group
constexpr int kBlockBytes = kBlockCodes + 64 * 2;  // and their FP16 scales
constexpr int kStageColumns = 128;                 // of K in a stage: two groups, one swizzled row of activations
constexpr int kSharedBytes = 227 * 1024;           // that blocks on one multiprocessor share
constexpr int kRankStep = 16;                      // of the low-rank product, k of mma.m16n8k16
constexpr int kLowRankRowBytes = kRankStep * 2;    // one feature or token of a rank step

// Offsets in bytes. A stage holds two groups of K or, after the last of them, one step of the low-rank product.
template <int act_bits, class Tile>
struct Plan {
    static constexpr int kRowBlocks = Tile::kWarpgroups * Tile::kRowBlocks;

    static constexpr int kTokens = 0;                                             // [tokens][128] int8, swizzled
    static constexpr int kWeights = kTokens + Tile::kTokens * kStageColumns;      // [row block][group][kBlockBytes]
    static constexpr int kGroupScales = kWeights + kRowBlocks * 2 * kBlockBytes;  // 4 bits: [tokens/16][group][16] FP32
    static constexpr int kGroupsEnd = kGroupScales + (act_bits == 4 ? Tile::kTokens * 2 * 4 : 0);

    static constexpr int kProjUp = 0;                                                 // A fragments
    static constexpr int kLoraAct = kProjUp + Tile::kFeatures * kLowRankRowBytes;     // B fragments
    static constexpr int kTokenScales = kLoraAct + Tile::kTokens * kLowRankRowBytes;  // 8 bits: [tokens] FP32
    static constexpr int kLowRankEnd = kTokenScales + (act_bits == 8 ? Tile::kTokens * 4 : 0);

    static constexpr int kEnd = kGroupsEnd > kLowRankEnd ? kGroupsEnd : kLowRankEnd;
    static constexpr int kStageBytes = (kEnd + 16 + 1023) / 1024 * 1024;  // the swizzle counts rows from 1024 bytes on
    static constexpr int kFull = kStageBytes - 16;                        // barriers sit at the end of their stage
    static constexpr int kEmpty = kStageBytes - 8;

    // Output passes through slices of 16 tokens, two for each consumer.
    static constexpr int kSliceBytes = 16 * Tile::kRowBlocks * 64 * 4;
    static constexpr int kSlices = 2 * Tile::kWarpgroups * kSliceBytes;

    static constexpr int kRoom = kSharedBytes / Tile::kBlocks - 1024 * Tile::kBlocks - 1024 - kSlices;
    static constexpr int kStages = kRoom / kStageBytes < 8 ? kRoom / kStageBytes : 8;
    static constexpr int kBytes = 1024 + kStages * kStageBytes + kSlices;  // the first 1024 to align the stages
    static_assert(kStages >= kChunkGroups / 2 + 1);                        // consumers hold a chunk's stages at once
};

// Where a thread is in the ring. Producer and consumers go through the same sequence of stages.
template <class Plan>
struct Ring {
    uint32_t base;
    int stage = 0;
    uint32_t phase = 0;

    // The current stage's address; then steps on.
    __device__ __forceinline__ uint32_t next() {
        const uint32_t address = base + stage * Plan::kStageBytes;
        if (++stage == Plan::kStages) {
            stage = 0;
            phase ^= 1;
        }
        return address;
    }
    __device__ __forceinline__ uint32_t next_full() {
        const uint32_t parity = phase, address = next();
        ptx::mbarrier_wait(address + Plan::kFull, parity);
        return address;
    }
    __device__ __forceinline__ uint32_t next_empty() {
        const uint32_t parity = phase ^ 1, address = next();
        ptx::mbarrier_wait(address + Plan::kEmpty, parity);
        return address;
    }
};

// The problem as blocks see it: sizes are worked out again where they are needed, which is cheaper than a register held
// through the main loop. Tiles are counted along the tokens first: neighbours share weights in L2.
template <class Tile>
struct Problem {
    const GemmLoraUpParams& p;

    __device__ __forceinline__ int groups() const { return p.in_features / kGroup; }
    __device__ __forceinline__ int stages() const { return (groups() + 1) / 2; }
    __device__ __forceinline__ int rank_steps() const { return p.rank / kRankStep; }
    __device__ __forceinline__ int64_t padded_rows() const { return round_up(p.rows, kRowTile); }
    __device__ __forceinline__ int padded_features() const {
        return static_cast<int>(round_up(p.out_features, kColumnBlock));
    }
    __device__ __forceinline__ int token_tiles() const { return static_cast<int>(ceil_div(p.rows, Tile::kTokens)); }
    __device__ __forceinline__ int tiles() const { return token_tiles() * (padded_features() / Tile::kFeatures); }
    __device__ __forceinline__ int first_feature(int tile) const { return tile / token_tiles() * Tile::kFeatures; }
    __device__ __forceinline__ int64_t first_token(int tile) const {
        return static_cast<int64_t>(tile % token_tiles()) * Tile::kTokens;
    }
};

// Stages after those of K: the low-rank steps; token scales come with the first, which is there for them alone when R = 0.
template <int act_bits>
__device__ __forceinline__ int last_stages(int rank_steps) {
    return act_bits == 8 && rank_steps == 0 ? 1 : rank_steps;
}

}  // namespace omniw4::gemm::sm90a
