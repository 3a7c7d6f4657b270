// What a block of the mma_s8 GEMM copies: stages of two groups of K, by cp.async.
//
// Weights and their scales lie in memory in fragment order and are copied as they are. A token's 128 bytes of a stage are
// eight 16-byte chunks, swizzled by the row, so that the eight rows that one phase of ldmatrix reads lie in different
// banks.
#pragma once

#include "../common/fragment.cuh"
#include "../omniw4.h"
#include "../ptx/cp_async.cuh"
#include "tile_s8_sm80.h"

namespace omniw4::gemm::s8 {

constexpr int kFeatureBlock = 64;                        // output features a block of qweight holds
constexpr int kBlockCodes = kFeatureBlock * kGroup / 2;  // bytes of its codes
constexpr int kRowBytes = kGroup * kStageGroups;         // of a token in a stage

// The kinds of scales.
struct Integer {  // m, a byte a group, folded into the weights; FP32 of the row and of the token after the last group
    static constexpr int kWScaleBytes = 1, kAScaleBytes = 0;
    static constexpr bool kInteger = true, kTokenScale = true;
};
struct Groups {  // FP16 a group of weights, FP32 (of an FP16) a group of activations
    static constexpr int kWScaleBytes = 2, kAScaleBytes = 4;
    static constexpr bool kInteger = false, kTokenScale = false;
};
struct Tokens {  // FP16 a group of weights; FP32 of the token after the last group
    static constexpr int kWScaleBytes = 2, kAScaleBytes = 0;
    static constexpr bool kInteger = false, kTokenScale = true;
};

// Shared memory of one pipeline stage, in bytes.
template <class Tile, class Scales>
struct Stage {
    static constexpr int kBlocks = Tile::kFeatures / kFeatureBlock;
    static constexpr int kBlockScales = kFeatureBlock * Scales::kWScaleBytes;
    static constexpr int kCodes = 0;                                               // [blocks][groups][4 warps][32][16]
    static constexpr int kTokens = kCodes + kBlocks * kStageGroups * kBlockCodes;  // [tokens][128], swizzled
    static constexpr int kWScales = kTokens + Tile::kTokens * kRowBytes;           // [blocks][groups][4][8][2]
    static constexpr int kAScales = kWScales + kBlocks * kStageGroups * kBlockScales;  // [groups][tokens] FP32
    static constexpr int kBytes = kAScales + kStageGroups * Tile::kTokens * Scales::kAScaleBytes;
    static_assert(kTokens % 128 == 0 && kBytes % 128 == 0);
};

// One block's tile of the output.
template <class Tile, class Scales>
struct Block {
    const GemmLoraUpParams& p;
    int groups;
    int64_t first_token;
    int first_feature;

    __device__ __forceinline__ explicit Block(const GemmLoraUpParams& params)
        : p(params),
          groups(params.in_features / kGroup),
          first_token(static_cast<int64_t>(blockIdx.x) * Tile::kTokens),
          first_feature(static_cast<int>(blockIdx.y) * Tile::kFeatures) {}
};

// A thread's copies into a stage. What lies past M or N is copied from the last row or block that there is, and its
// products are not stored; what lies past K becomes zero. So a stage differs from the one before by an offset alone.
template <class Tile, class Scales>
class Copies {
    using S = Stage<Tile, Scales>;
    static constexpr int kThreads = Tile::kThreads, kGroupChunks = kBlockCodes / 16, kRowChunks = kRowBytes / 16;
    static constexpr int kCodePasses = S::kBlocks * kStageGroups * kGroupChunks / kThreads;
    static constexpr int kTokenPasses = (Tile::kTokens * kRowChunks + kThreads - 1) / kThreads;
    static constexpr int kScaleChunks = S::kBlockScales / 16, kWScaleCopies = S::kBlocks * kStageGroups * kScaleChunks;
    static constexpr int kTokenFours = Tile::kTokens / 4, kAScaleCopies = kStageGroups * kTokenFours;
    static_assert(kCodePasses * kThreads == S::kBlocks * kStageGroups * kGroupChunks);
    static_assert(kThreads % kGroupChunks == 0 && kThreads % (8 * kRowChunks) == 0);
    static_assert(kWScaleCopies <= kThreads && kAScaleCopies <= kThreads);

    int groups_;
    const uint8_t *codes_, *tokens_, *w_scales_;  // of this block, step 0
    int code_offset_[kCodePasses], token_offset_[kTokenPasses], w_scale_offset_;
    int64_t a_scale_step_ = 0;
    const float* a_scale_ = nullptr;

    __device__ __forceinline__ bool within_k(int step, int group) const {
        return step * kStageGroups + group < groups_;
    }
    // Past K nothing is read, and the address is that of the group before.
    template <class E>
    static __device__ __forceinline__ void copy(uint32_t to, const E* from, bool within_k, int64_t group_step) {
        ptx::cp_async_16(to, within_k ? from : from - group_step, within_k);
    }

    // Group and feature block of the chunk that this thread copies in a pass.
    static __device__ __forceinline__ int code_group(int pass) {
        constexpr int kGroups = kThreads / kGroupChunks;  // that a pass copies
        return (kGroups == 1 ? pass : static_cast<int>(threadIdx.x) / kGroupChunks) % kStageGroups;
    }
    static __device__ __forceinline__ int code_block(int pass) {
        constexpr int kGroups = kThreads / kGroupChunks;
        return (kGroups == 1 ? pass : pass * kGroups + static_cast<int>(threadIdx.x) / kGroupChunks) / kStageGroups;
    }

  public:
    __device__ __forceinline__ explicit Copies(const Block<Tile, Scales>& block) : groups_(block.groups) {
        const GemmLoraUpParams& p = block.p;
        const int thread = static_cast<int>(threadIdx.x);
        const int first_block = block.first_feature / kFeatureBlock;
        const int last_block = (p.out_features - 1) / kFeatureBlock - first_block;
        codes_ = static_cast<const uint8_t*>(p.qweight) + static_cast<int64_t>(first_block) * groups_ * kBlockCodes;
#pragma unroll
        for (int pass = 0; pass < kCodePasses; ++pass) {
            const int group = min(code_block(pass), last_block) * groups_ + code_group(pass);
            code_offset_[pass] = group * kBlockCodes + thread % kGroupChunks * 16;
        }
        tokens_ = static_cast<const uint8_t*>(p.qact) + block.first_token * p.in_features;
        const int last_token = static_cast<int>(min(p.rows - block.first_token, int64_t{Tile::kTokens})) - 1;
#pragma unroll
        for (int pass = 0; pass < kTokenPasses; ++pass) {
            const int token = min((thread + pass * kThreads) / kRowChunks, last_token);
            token_offset_[pass] = token * p.in_features + thread % kRowChunks * 16;
        }
        w_scales_ =
            static_cast<const uint8_t*>(p.w_scales) + static_cast<int64_t>(first_block) * groups_ * S::kBlockScales;
        const int chunk = thread % (kStageGroups * kScaleChunks);
        w_scale_offset_ =
            min(thread / (kStageGroups * kScaleChunks), last_block) * groups_ * S::kBlockScales + chunk * 16;
        if constexpr (Scales::kAScaleBytes > 0) {
            const int64_t padded = round_up(p.rows, kRowTile);
            const int64_t token = min(block.first_token + thread % kTokenFours * 4, padded - 4);
            a_scale_step_ = padded * kStageGroups;
            a_scale_ = static_cast<const float*>(p.a_scales) + thread / kTokenFours * padded + token;
        }
    }

    // Starts the copies of groups step * kStageGroups onwards.
    __device__ __forceinline__ void start(uint32_t stage, int step) const {
        const int thread = static_cast<int>(threadIdx.x);
        const uint8_t* codes = codes_ + static_cast<int64_t>(step) * (kStageGroups * kBlockCodes);
#pragma unroll
        for (int pass = 0; pass < kCodePasses; ++pass) {
            const uint32_t to = stage + S::kCodes + (thread + pass * kThreads) * 16;
            copy(to, codes + code_offset_[pass], within_k(step, code_group(pass)), kBlockCodes);
        }
        const uint8_t* tokens = tokens_ + static_cast<int64_t>(step) * kRowBytes;
        const int row = thread / kRowChunks, chunk = thread % kRowChunks;
        const bool tokens_within_k = within_k(step, chunk / (kGroup / 16));
        const uint32_t row_address = stage + S::kTokens + row * kRowBytes + (chunk ^ row % 8) * 16;
#pragma unroll
        for (int pass = 0; pass < kTokenPasses; ++pass) {
            if (Tile::kTokens * kRowChunks < kThreads && thread >= Tile::kTokens * kRowChunks) break;
            copy(row_address + pass * kThreads * 16, tokens + token_offset_[pass], tokens_within_k, kGroup);
        }
        if (thread < kWScaleCopies) {
            const uint8_t* from = w_scales_ + static_cast<int64_t>(step) * (kStageGroups * S::kBlockScales);
            copy(stage + S::kWScales + thread * 16, from + w_scale_offset_,
                 within_k(step, thread / kScaleChunks % kStageGroups), S::kBlockScales);
        }
        if constexpr (Scales::kAScaleBytes > 0) {
            if (thread < kAScaleCopies) {
                copy(stage + S::kAScales + thread * 16, a_scale_ + step * a_scale_step_,
                     within_k(step, thread / kTokenFours), a_scale_step_ / kStageGroups);
            }
        }
    }
};

}  // namespace omniw4::gemm::s8
