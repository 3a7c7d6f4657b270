// The threads that feed a block of the GEMM with integer group scales, one of a warp: bulk copies of whole fragments, in
// the order in which the consumers want them. One copies what comes of the tokens, the others weights: a thread needs
// some 100 cycles for a copy, and weights need not wait for who makes the activations.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/grid_blocks.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/settle.cuh"
#include "integer_pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

template <class Tile>
struct Producer {
    using Plan = integer::Plan<Tile>;
    static constexpr int kBlocksEach = (Plan::kRowBlocks + Tile::kWeightWarps - 1) / Tile::kWeightWarps;
    const GemmLoraUpParams& p;
    const Problem<Tile> problem;
    Ring<Plan> ring;

    // Of stage `step` of this block's: the first group of 64 features, and bytes of its groups.
    __device__ __forceinline__ const uint8_t* weights(int feature, int step) const {
        const int64_t block =
            static_cast<int64_t>(feature / 64) * problem.groups() + (problem.first_stage() + step) * 2;
        return static_cast<const uint8_t*>(p.qweight) + block * kBlockBytes;
    }
    __device__ __forceinline__ uint32_t block_bytes(int step) const {
        return min(2, problem.groups() - 2 * (problem.first_stage() + step)) * kBlockBytes;
    }
    // Of this thread's row blocks in a tile, how many are there.
    __device__ __forceinline__ int blocks_here(int first_block, int feature) const {
        const int blocks = problem.row_blocks(feature);
        return first_block < blocks ? (first_block + Tile::kWeightWarps < blocks ? kBlocksEach : 1) : 0;
    }

    // Weights of the first tile on their way from memory while the kernel before is still busy, of row blocks first, first
    // + step and so on. Only a hint: what that kernel may have written (a repacked weight, say) is read after it is done.
    __device__ __forceinline__ void prefetch(int first, int step, int lane) const {
        constexpr int kStagesAhead = 128;
        const int feature = problem.first_feature(problem.first_tile()), blocks = problem.row_blocks(feature);
        const int stages = min(problem.stages(), kStagesAhead), copied = p.weights_ready ? Plan::kStages : 0;
#pragma unroll 1
        for (int stage = copied + lane; stage < stages; stage += kWarp) {
#pragma unroll 1
            for (int block = first; block < blocks; block += step) {
                ptx::bulk_prefetch_l2(weights(feature + block * 64, stage), block_bytes(stage));
            }
        }
    }

    // Copies row blocks first_block and, of four, first_block + 3. Weights that the caller vouches for are copied before
    // the kernel ahead is done, as many stages as there are.
    __device__ __forceinline__ void run_weights(int first_block) {
        if (!p.weights_ready) ptx::pdl_wait();
        const int stages = problem.stages(), steps = problem.rounds() * Tile::kSplits;
        for (int tile = problem.first_tile(); tile < problem.tiles(); tile += gridDim.x) {
            const int feature = problem.first_feature(tile), blocks = blocks_here(first_block, feature);
            const uint8_t* source[kBlocksEach];
#pragma unroll
            for (int i = 0; i < kBlocksEach; ++i) {
                source[i] = weights(feature + (first_block + i * Tile::kWeightWarps) * 64, 0);
            }
            uint32_t bytes = 2 * kBlockBytes;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                const int at = ring.next_empty();
                if (step == stages - 1) bytes = block_bytes(step);
                const bool any = blocks > 0 && step < stages;
                ptx::mbarrier_arrive_expect(ring.full(at), any ? blocks * bytes : 0);
                if (!any) continue;
#pragma unroll
                for (int i = 0; i < kBlocksEach; ++i) {
                    if (i > 0 && i >= blocks) break;
                    const int block = first_block + i * Tile::kWeightWarps;
                    ptx::bulk_copy(ring.stage(at) + Plan::kWeights + block * 2 * kBlockBytes, source[i], bytes,
                                   ring.full(at));
                    source[i] += 2 * kBlockBytes;
                }
            }
            if (!problem.finishes()) break;
            ptx::pdl_wait();  // proj_up and row scales are not vouched for
#pragma unroll 1
            for (int step = 0; step < problem.last_stages(); ++step) {
                const int at = ring.next_empty();
                if (first_block == 0) {
                    copy_features(at, step, feature);
                } else {
                    ptx::mbarrier_arrive(ring.full(at));
                }
            }
            offer_output();
            if (Tile::kClusters) break;
        }
    }

    __device__ __forceinline__ void run_tokens() {
        const uint32_t padded_rows = static_cast<uint32_t>(problem.padded_rows());
        const uint32_t token_tiles = problem.token_tiles();
        const uint32_t stages = problem.stages(), steps = problem.rounds() * Tile::kSplits;
        uint32_t tile = problem.first_tile(), token = tile % token_tiles * Tile::kTokens;
        const uint8_t* qact = static_cast<const uint8_t*>(p.qact) +
                              (problem.first_stage() * uint64_t{padded_rows} + token) * kStageColumns;
        uint32_t rows = min(padded_rows - token, static_cast<uint32_t>(Tile::kTokens));
        // What can be done before the wait is: the first stages' bytes are announced, and their place is worked out.
        uint32_t ahead = min(stages, static_cast<uint32_t>(Plan::kStages));
#pragma unroll 1
        for (uint32_t i = 0; i < ahead; ++i) ptx::mbarrier_arrive_expect(ring.full(i), rows * kStageColumns);
        ptx::bulk_prefetch_l2(qact, rows * kStageColumns);
        ptx::pdl_wait();
        while (true) {
            uint32_t bytes = rows * kStageColumns;
#pragma unroll 1
            for (uint32_t step = 0; step < steps; ++step) {
                const int at = ring.next_empty();
                if (Tile::kSplits > 1 && step == stages) bytes = 0;
                if (step >= ahead) ptx::mbarrier_arrive_expect(ring.full(at), bytes);
                if (Tile::kSplits == 1 || bytes > 0) {
                    ptx::bulk_copy(ring.stage(at) + Plan::kTokens, qact, bytes, ring.full(at));
                }
                qact += uint64_t{padded_rows} * kStageColumns;
            }
            ahead = 0;
            if (!problem.finishes()) break;
            const uint32_t own_token = token + problem.part() * Tile::kOwnTokens;
            if constexpr (Tile::kClusters) {  // there may be none
                rows = own_token < padded_rows ? min(padded_rows - own_token, uint32_t{Tile::kOwnTokens}) : 0;
            }
            copy_low_rank(tile / token_tiles * Tile::kFeatures, own_token, rows);
            offer_output();
            if (Tile::kClusters) break;
            tile += ptx::grid_blocks();
            if (tile >= static_cast<uint32_t>(problem.tiles())) break;
            token = tile % token_tiles * Tile::kTokens;
            rows = min(padded_rows - token, static_cast<uint32_t>(Tile::kTokens));
            qact = static_cast<const uint8_t*>(p.qact) + uint64_t{token} * kStageColumns;
        }
    }

    // Stages for the result: consumers may have them once they are empty. And what fills up a round.
    __device__ __forceinline__ void offer_output() {
        int count = Plan::kOutStages;
#pragma unroll 1
        for (; count > 0 || !ring.between_rounds(); --count) ptx::mbarrier_arrive(ring.full(ring.next_empty()));
    }

    __device__ __forceinline__ void copy_features(int at, int step, int feature) const {
        const uint32_t full = ring.full(at);
        const int features = problem.row_blocks(feature) * 64;
        const uint32_t up_bytes = p.rank > 0 ? features * kLowRankRowBytes : 0;
        const uint32_t scale_bytes = step == 0 ? features * static_cast<uint32_t>(sizeof(float)) : 0;
        ptx::mbarrier_arrive_expect(full, up_bytes + scale_bytes);
        if (up_bytes > 0) {
            const uint8_t* up = static_cast<const uint8_t*>(p.proj_up) +
                                (static_cast<int64_t>(step) * problem.padded_features() + feature) * kLowRankRowBytes;
            ptx::bulk_copy(ring.stage(at) + Plan::kProjUp, up, up_bytes, full);
        }
        if (scale_bytes > 0) {
            ptx::bulk_copy(ring.stage(at) + Plan::kRowScales, p.row_scales + feature, scale_bytes, full);
        }
    }

    __device__ __forceinline__ void copy_low_rank(int feature, uint32_t token, uint32_t rows) {
        uint32_t padded_rows = static_cast<uint32_t>(problem.padded_rows()), steps = problem.rank_steps();
        ptx::settle(padded_rows);  // here, and not before the first tile's tokens are on their way
        ptx::settle(steps);
        const int first = problem.segment(feature);
        const int segments = problem.segment(feature + problem.row_blocks(feature) * 64 - 64) - first + 1;
        uint64_t row = static_cast<uint64_t>(first) * steps * padded_rows + token;  // of all steps of all segments
        uint32_t step = 0;
        do {
            const int at = ring.next_empty();
            const uint32_t bytes = steps > 0 ? rows * kLowRankRowBytes : 0;
            const uint32_t scale_bytes = step == 0 ? rows * static_cast<uint32_t>(sizeof(float)) : 0;
            ptx::mbarrier_arrive_expect(ring.full(at), segments * bytes + scale_bytes);
            if (scale_bytes > 0) {
                ptx::bulk_copy(ring.stage(at) + Plan::kTokenScales, static_cast<const float*>(p.a_scales) + token,
                               scale_bytes, ring.full(at));
            }
#pragma unroll 1
            for (int segment = 0; bytes > 0 && segment < segments; ++segment) {
                const uint64_t from = row + static_cast<uint64_t>(segment) * steps * padded_rows;
                ptx::bulk_copy(ring.stage(at) + Plan::kLoraAct + segment * Plan::kSegmentBytes,
                               static_cast<const uint8_t*>(p.lora_act) + from * kLowRankRowBytes, bytes, ring.full(at));
            }
            row += padded_rows;
        } while (++step < steps);
    }
};

}  // namespace omniw4::gemm::sm90a::integer
