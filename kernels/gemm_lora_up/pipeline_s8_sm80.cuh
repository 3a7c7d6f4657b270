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

// The kinds of scales. kFetchUnroll: how often loops of copies are unrolled; more takes more registers than there are.
struct Integer {  // m, a byte a group, folded into the weights; FP32 of the row and of the token after the last group
    static constexpr int kWScaleBytes = 1, kAScaleBytes = 0;
    static constexpr bool kInteger = true, kTokenScale = true;
    static constexpr int kFetchUnroll = 4;
};
struct Groups {  // FP16 a group of weights, FP32 (of an FP16) a group of activations
    static constexpr int kWScaleBytes = 2, kAScaleBytes = 4;
    static constexpr bool kInteger = false, kTokenScale = false;
    static constexpr int kFetchUnroll = 2;
};
struct Tokens {  // FP16 a group of weights; FP32 of the token after the last group
    static constexpr int kWScaleBytes = 2, kAScaleBytes = 0;
    static constexpr bool kInteger = false, kTokenScale = true;
    static constexpr int kFetchUnroll = 2;
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

// One block's tile of the output and the memory it reads.
template <class Tile, class Scales>
struct Block {
    using S = Stage<Tile, Scales>;
    const GemmLoraUpParams& p;
    int groups, feature_blocks;
    int64_t first_token;
    int first_feature;

    __device__ __forceinline__ explicit Block(const GemmLoraUpParams& params)
        : p(params),
          groups(params.in_features / kGroup),
          feature_blocks(static_cast<int>(ceil_div(params.out_features, kFeatureBlock))),
          first_token(static_cast<int64_t>(blockIdx.x) * Tile::kTokens),
          first_feature(static_cast<int>(blockIdx.y) * Tile::kFeatures) {}

    // Chunks of 16 bytes of blocks [features / 64][groups], `chunks` of them each.
    template <int chunks>
    __device__ __forceinline__ void fetch_blocks(uint32_t to, const void* from, int group) const {
#pragma unroll(Scales::kFetchUnroll)
        for (int i = threadIdx.x; i < S::kBlocks * kStageGroups * chunks; i += Tile::kThreads) {
            const int block = first_feature / kFeatureBlock + i / (kStageGroups * chunks);
            const int within = i % (kStageGroups * chunks);
            const bool valid = block < feature_blocks && group + within / chunks < groups;
            const int64_t index = valid ? (static_cast<int64_t>(block) * groups + group) * chunks + within : 0;
            ptx::cp_async_16(to + i * 16, static_cast<const uint4*>(from) + index, valid);
        }
    }

    // Starts the copies of groups step * kStageGroups onwards; what lies past M, N or K becomes zero.
    __device__ __forceinline__ void fetch(uint32_t stage, int step) const {
        const int group = step * kStageGroups;
        fetch_blocks<kBlockCodes / 16>(stage + S::kCodes, p.qweight, group);
        constexpr int kChunks = kRowBytes / 16;
#pragma unroll(Scales::kFetchUnroll)
        for (int i = threadIdx.x; i < Tile::kTokens * kChunks; i += Tile::kThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const int64_t token = first_token + row;
            const bool valid = token < p.rows && group + chunk / (kGroup / 16) < groups;
            const int64_t offset = valid ? token * p.in_features + group * kGroup + chunk * 16 : 0;
            ptx::cp_async_16(stage + S::kTokens + row * kRowBytes + (chunk ^ row % 8) * 16,
                             static_cast<const int8_t*>(p.qact) + offset, valid);
        }
        fetch_blocks<S::kBlockScales / 16>(stage + S::kWScales, p.w_scales, group);
        if constexpr (Scales::kAScaleBytes > 0) {
            constexpr int kFours = Tile::kTokens / 4;
            const int64_t padded = round_up(p.rows, kRowTile);
            for (int i = threadIdx.x; i < kFours * kStageGroups; i += Tile::kThreads) {
                const int g = group + i / kFours;
                const int64_t token = first_token + i % kFours * 4;
                const bool valid = g < groups && token < padded;
                const float* source = static_cast<const float*>(p.a_scales) + (valid ? g * padded + token : 0);
                ptx::cp_async_16(stage + S::kAScales + i * 16, source, valid);
            }
        }
    }
};

}  // namespace omniw4::gemm::s8
