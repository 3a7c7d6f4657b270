// The thread that feeds a block: bulk copies of whole fragments, in the order in which the consumers want them.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/pdl.cuh"
#include "pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a {

template <int act_bits, class Tile>
struct Producer {
    using Plan = sm90a::Plan<act_bits, Tile>;
    const GemmLoraUpParams& p;
    const Problem<Tile> problem;
    Ring<Plan> ring;

    __device__ __forceinline__ const uint8_t* weights(int feature, int group) const {
        const int64_t block = static_cast<int64_t>(feature / 64) * problem.groups() + group;
        return static_cast<const uint8_t*>(p.qweight) + block * kBlockBytes;
    }

    // Weights of the first tile on their way from memory while the kernel before is still busy. Only a hint: what that
    // kernel may have written (a repacked weight, say) is read after it is done.
    __device__ __forceinline__ void prefetch(int lane) const {
        constexpr int kStagesAhead = 64;
        const int feature = problem.first_feature(blockIdx.x);
        const int stages = min(problem.stages(), kStagesAhead);
#pragma unroll 1
        for (int stage = lane; stage < stages; stage += kWarp) {
            const uint32_t bytes = min(2, problem.groups() - 2 * stage) * kBlockBytes;
#pragma unroll
            for (int b = 0; b < Plan::kRowBlocks; ++b)
                ptx::bulk_prefetch_l2(weights(feature + b * 64, stage * 2), bytes);
        }
    }

    __device__ __forceinline__ void run() {
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            const int feature = problem.first_feature(tile);
            const int64_t token = problem.first_token(tile);
            const int rows = static_cast<int>(min(static_cast<int64_t>(Tile::kTokens), problem.padded_rows() - token));
#pragma unroll 1
            for (int step = 0; step < problem.stages(); ++step)
                copy_groups(ring.next_empty(), step, feature, token, rows);
            const int steps = last_stages<act_bits>(problem.rank_steps());
#pragma unroll 1
            for (int step = 0; step < steps; ++step) copy_low_rank(ring.next_empty(), step, feature, token, rows);
        }
    }

    __device__ __forceinline__ void copy_groups(uint32_t stage, int step, int feature, int64_t token, int rows) const {
        const uint32_t full = stage + Plan::kFull;
        const uint32_t block_bytes = min(2, problem.groups() - 2 * step) * kBlockBytes;
        const uint32_t token_bytes = rows * kStageColumns;
        const uint32_t scale_bytes = act_bits == 4 ? rows * 2 * sizeof(float) : 0;
        ptx::mbarrier_arrive_expect(full, Plan::kRowBlocks * block_bytes + token_bytes + scale_bytes);
#pragma unroll
        for (int b = 0; b < Plan::kRowBlocks; ++b) {
            ptx::bulk_copy(stage + Plan::kWeights + b * 2 * kBlockBytes, weights(feature + b * 64, 2 * step),
                           block_bytes, full);
        }
        const int64_t row = step * problem.padded_rows() + token;
        const uint8_t* codes = static_cast<const uint8_t*>(p.qact) + row * kStageColumns;
        ptx::bulk_copy(stage + Plan::kTokens, codes, token_bytes, full);
        if constexpr (act_bits == 4) {
            ptx::bulk_copy(stage + Plan::kGroupScales, static_cast<const float*>(p.a_scales) + row * 2, scale_bytes,
                           full);
        }
    }

    __device__ __forceinline__ void copy_low_rank(uint32_t stage, int step, int feature, int64_t token,
                                                  int rows) const {
        const uint32_t full = stage + Plan::kFull;
        const uint32_t up_bytes = p.rank > 0 ? Tile::kFeatures * kLowRankRowBytes : 0;
        const uint32_t lora_bytes = p.rank > 0 ? rows * kLowRankRowBytes : 0;
        const uint32_t scale_bytes = act_bits == 8 && step == 0 ? rows * sizeof(float) : 0;
        ptx::mbarrier_arrive_expect(full, up_bytes + lora_bytes + scale_bytes);
        if (p.rank > 0) {
            const uint8_t* up = static_cast<const uint8_t*>(p.proj_up) +
                                (static_cast<int64_t>(step) * problem.padded_features() + feature) * kLowRankRowBytes;
            const uint8_t* lora =
                static_cast<const uint8_t*>(p.lora_act) + (step * problem.padded_rows() + token) * kLowRankRowBytes;
            ptx::bulk_copy(stage + Plan::kProjUp, up, up_bytes, full);
            ptx::bulk_copy(stage + Plan::kLoraAct, lora, lora_bytes, full);
        }
        if (scale_bytes > 0) {
            ptx::bulk_copy(stage + Plan::kTokenScales, static_cast<const float*>(p.a_scales) + token, scale_bytes,
                           full);
        }
    }
};

}  // namespace omniw4::gemm::sm90a
