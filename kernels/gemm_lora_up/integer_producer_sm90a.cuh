// The thread that feeds a block of the GEMM with integer group scales: bulk copies of whole fragments, in the order in
// which the consumers want them.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/pdl.cuh"
#include "integer_pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

template <class Tile>
struct Producer {
    using Plan = integer::Plan<Tile>;
    const GemmLoraUpParams& p;
    const Problem<Tile> problem;
    Ring<Plan> ring;

    __device__ __forceinline__ const uint8_t* weights(int feature, int group) const {
        const int64_t block = static_cast<int64_t>(feature / 64) * problem.groups() + group;
        return static_cast<const uint8_t*>(p.qweight) + block * kBlockBytes;
    }
    __device__ __forceinline__ uint32_t block_bytes(int step) const {
        return min(2, problem.groups() - 2 * step) * kBlockBytes;
    }

    // Weights of the first tile on their way from memory while the kernel before is still busy. Only a hint: what that
    // kernel may have written (a repacked weight, say) is read after it is done.
    __device__ __forceinline__ void prefetch(int lane) const {
        constexpr int kStagesAhead = 128;
        const int feature = problem.first_feature(blockIdx.x);
        const int stages = min(problem.stages(), kStagesAhead), blocks = problem.row_blocks(feature);
#pragma unroll 1
        for (int stage = lane; stage < stages; stage += kWarp) {
            for (int b = 0; b < blocks; ++b)
                ptx::bulk_prefetch_l2(weights(feature + b * 64, stage * 2), block_bytes(stage));
        }
    }

    // The first `ahead` stages' weights are copied before the kernel ahead is done: the caller vouches for them.
    __device__ __forceinline__ void run() {
        int ahead = p.weights_ready ? min(Plan::kStages, problem.stages()) : 0;
        for (int step = 0; step < ahead; ++step) {
            copy_weights(ring.base + step * Plan::kStageBytes, step, problem.first_feature(blockIdx.x),
                         token_rows(problem.first_token(blockIdx.x)));
        }
        ptx::pdl_wait();
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            const int feature = problem.first_feature(tile);
            const int64_t token = problem.first_token(tile);
            const int rows = token_rows(token);
#pragma unroll 1
            for (int step = 0; step < problem.stages(); ++step) {
                const uint32_t stage = ring.next_empty();
                if (step >= ahead) copy_weights(stage, step, feature, rows);
                const int64_t row = step * problem.padded_rows() + token;
                ptx::bulk_copy(stage + Plan::kTokens, static_cast<const uint8_t*>(p.qact) + row * kStageColumns,
                               rows * kStageColumns, stage + Plan::kFull);
            }
            ahead = 0;
#pragma unroll 1
            for (int step = 0; step < problem.last_stages(); ++step) {
                copy_low_rank(ring.next_empty(), step, feature, token, rows);
            }
        }
    }

    __device__ __forceinline__ int token_rows(int64_t token) const {
        return static_cast<int>(min(static_cast<int64_t>(Tile::kTokens), problem.padded_rows() - token));
    }

    // And announces the bytes of the tokens that go with them.
    __device__ __forceinline__ void copy_weights(uint32_t stage, int step, int feature, int rows) const {
        const uint32_t full = stage + Plan::kFull, bytes = block_bytes(step);
        const int blocks = problem.row_blocks(feature);
        ptx::mbarrier_arrive_expect(full, blocks * bytes + rows * kStageColumns);
#pragma unroll
        for (int b = 0; b < Plan::kRowBlocks; ++b) {
            if (b >= blocks) break;
            ptx::bulk_copy(stage + Plan::kWeights + b * 2 * kBlockBytes, weights(feature + b * 64, 2 * step), bytes,
                           full);
        }
    }

    __device__ __forceinline__ void copy_low_rank(uint32_t stage, int step, int feature, int64_t token,
                                                  int rows) const {
        const uint32_t full = stage + Plan::kFull;
        const int features = problem.row_blocks(feature) * 64;
        const int first = problem.segment(feature), last = problem.segment(feature + features - 64);
        const uint32_t up_bytes = features * kLowRankRowBytes, lora_bytes = rows * kLowRankRowBytes;
        const uint32_t low_rank_bytes = p.rank > 0 ? up_bytes + (last - first + 1) * lora_bytes : 0;
        const uint32_t scale_bytes = step == 0 ? (features + rows) * static_cast<uint32_t>(sizeof(float)) : 0;
        ptx::mbarrier_arrive_expect(full, low_rank_bytes + scale_bytes);
        if (p.rank > 0) {
            const uint8_t* up = static_cast<const uint8_t*>(p.proj_up) +
                                (static_cast<int64_t>(step) * problem.padded_features() + feature) * kLowRankRowBytes;
            ptx::bulk_copy(stage + Plan::kProjUp, up, up_bytes, full);
            for (int segment = first; segment <= last; ++segment) {
                const int64_t row = (segment * problem.rank_steps() + step) * problem.padded_rows() + token;
                ptx::bulk_copy(stage + Plan::kLoraAct + (segment - first) * Plan::kSegmentBytes,
                               static_cast<const uint8_t*>(p.lora_act) + row * kLowRankRowBytes, lora_bytes, full);
            }
        }
        if (step == 0) {
            ptx::bulk_copy(stage + Plan::kTokenScales, static_cast<const float*>(p.a_scales) + token,
                           rows * sizeof(float), full);
            ptx::bulk_copy(stage + Plan::kRowScales, p.row_scales + feature, features * sizeof(float), full);
        }
    }
};

}  // namespace omniw4::gemm::sm90a::integer
