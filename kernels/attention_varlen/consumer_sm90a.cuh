// A consumer warpgroup: one unit, 64 query rows of one head, over all key tiles in their order.
//
// The scores of the next tile and the product of this tile's probabilities with its values are issued together; while
// the tensor cores work on the second, the warps turn the first into probabilities. The two warpgroups of a block take
// turns at issuing, so that one computes exponentials while the other's products run.
// Source: FlashAttention-3, arXiv 2407.08608, section 3.
#pragma once

#include "../common/scalar.cuh"
#include "../ptx/bar_sync.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/shared_memory.cuh"
#include "../ptx/wgmma.cuh"
#include "../ptx/wgmma_f16.cuh"
#include "pipeline_sm90a.cuh"
#include "softmax.cuh"

namespace omniw4::attention {

// Keeps the compiler from moving uses of registers that products in flight write across this point.
template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Keys of a unit.
struct Extent {
    int keys;      // that the block goes through
    int unmasked;  // so many count for every row of the unit
    int last[2];   // the last one that counts for rows g and g + 8 of this lane
};

template <class T, int head_dim, int key_tile>
struct Consumer {
    using Plan = attention::Plan<head_dim, key_tile>;
    using Scores = float[key_tile / 2];
    using Output = float[head_dim / 2];
    using Probabilities = uint32_t[key_tile / 16][4];
    using Query = uint32_t[head_dim / 16][4];

    const AttentionVarlenParams& p;
    uint32_t base;
    int warpgroup;
    Place<Plan::kStages> keys{}, values{};
    uint32_t works = 0, tails = 0;
    Query query{};

    static __device__ __forceinline__ int warp() { return threadIdx.x / kWarp; }

    __device__ __forceinline__ void take_turn() const { ptx::bar_sync(1 + warpgroup, kWarpgroups * 128); }
    __device__ __forceinline__ void pass_turn() const { ptx::bar_arrive(2 - warpgroup, kWarpgroups * 128); }

    __device__ __forceinline__ void arrive(uint32_t barrier) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(base + barrier);
    }

    __device__ __forceinline__ void load_query() {
        ptx::mbarrier_wait(base + Plan::kQueriesFull, works % 2);
        const Lane lane;
        const int row = warp() % 4 * 16 + lane.index % 16;
        const uint32_t tile = base + Plan::kQueries + warpgroup * Plan::kQueryBytes + row * kRowBytes;
#pragma unroll
        for (int k = 0; k < head_dim / 16; ++k) {
            const int chunk = (k % 4 * 2 + lane.index / 16) ^ row % 8;
            ptx::ldmatrix_x4(query[k], tile + k / 4 * Plan::kQueryPanelBytes + chunk * 16);
        }
        arrive(Plan::kQueriesEmpty);
    }

    // scores = query * keys^T
    __device__ __forceinline__ void multiply_keys(Scores& scores) {
        const uint32_t tile =
            ptx::wgmma_panels_low(base + Plan::kKeys, Plan::kTilePanelBytes) + keys.stage * (Plan::kTileBytes / 16);
        const uint32_t rows =
            ptx::wgmma_panels_low(base + Plan::kQueries, Plan::kQueryPanelBytes) + warpgroup * (Plan::kQueryBytes / 16);
        pin(scores);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < head_dim / 16; ++k) {
            const int inside = k % 4 * 32, panel = k / 4;
            const uint64_t b = ptx::wgmma_panels(tile + (panel * Plan::kTilePanelBytes + inside) / 16);
            ptx::wgmma_m64k16<key_tile, T, ptx::Major::kK>(scores, query[k], b, k > 0);
        }
        ptx::wgmma_commit();
    }

    // output += probabilities * values, of the first `count` keys of the tile, rounded up to 16.
    template <bool whole>
    __device__ __forceinline__ void multiply_values(Output& output, const Probabilities& probabilities, int count) {
        const uint32_t tile =
            ptx::wgmma_panels_low(base + Plan::kValues, Plan::kTilePanelBytes) + values.stage * (Plan::kTileBytes / 16);
        pin(output);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < key_tile / 16; ++k) {
            if (!whole && k > 0) {
                if (k * 16 >= count) continue;
                ptx::wgmma_fence();
            }
            const uint64_t b = ptx::wgmma_panels(tile + k * kRowBytes);
            ptx::wgmma_m64k16<head_dim, T, ptx::Major::kN>(output, probabilities[k], b, true);
        }
        ptx::wgmma_commit();
    }

    static __device__ __forceinline__ void to_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
        for (int i = 0; i < key_tile / 4; ++i) {
            probabilities[i / 4][i % 4] = Scalar<T>::pack(scores[2 * i], scores[2 * i + 1]);
        }
    }

    // Scores of the next tile, and the product of the one before.
    template <bool masked>
    __device__ __forceinline__ void next_tile(int first_key, const Extent& extent, Softmax& softmax, Scores& scores,
                                              Probabilities& probabilities, Output& output) {
        ptx::mbarrier_wait(base + Plan::kKeysFull + keys.stage * 8, keys.phase);
        take_turn();
        multiply_keys(scores);
        multiply_values<true>(output, probabilities, key_tile);
        pass_turn();
        ptx::wgmma_wait<1>();
        pin(scores);
        arrive(Plan::kKeysEmpty + keys.stage * 8);
        keys.step();
        softmax.tile<masked>(scores, extent.last[0] - first_key, extent.last[1] - first_key);
        pin(scores);
        // For the product to come. Here, because the compiler would do the exponentials after the wait below if they
        // were in one basic block with it.
        Place<Plan::kStages> next = values;
        next.step();
        ptx::mbarrier_wait(base + Plan::kValuesFull + next.stage * 8, next.phase);
        ptx::wgmma_wait<0>();
        pin(output);
        pin(scores);
        arrive(Plan::kValuesEmpty + values.stage * 8);
        values = next;
        if (softmax.shrinks()) {
#pragma unroll
            for (int i = 0; i < head_dim / 2; ++i) output[i] = __fmul_rn(output[i], softmax.shrink[i / 2 % 2]);
        }
        to_probabilities(scores, probabilities);
    }

    __device__ __forceinline__ void attend(const Extent& extent, Softmax& softmax, Output& output) {
        Scores scores;
        Probabilities probabilities;
        load_query();
        ptx::mbarrier_wait(base + Plan::kKeysFull + keys.stage * 8, keys.phase);
        take_turn();
        multiply_keys(scores);
        pass_turn();
        ptx::wgmma_wait<0>();
        pin(scores);
        arrive(Plan::kKeysEmpty + keys.stage * 8);
        keys.step();
        if (key_tile <= extent.unmasked) {
            softmax.tile<false>(scores, 0, 0);
        } else {
            softmax.tile<true>(scores, extent.last[0], extent.last[1]);
        }
        to_probabilities(scores, probabilities);
        ptx::mbarrier_wait(base + Plan::kValuesFull + values.stage * 8, values.phase);

        int first_key = key_tile;
#pragma unroll 1
        for (; first_key + key_tile <= extent.unmasked; first_key += key_tile) {
            next_tile<false>(first_key, extent, softmax, scores, probabilities, output);
        }
#pragma unroll 1
        for (; first_key < extent.keys; first_key += key_tile) {
            next_tile<true>(first_key, extent, softmax, scores, probabilities, output);
        }

        if (extent.keys % 16 != 0) {
            ptx::mbarrier_wait(base + Plan::kTailReady + tails % 2 * 8, tails / 2 % 2);
            ++tails;
        }
        take_turn();
        multiply_values<false>(output, probabilities, extent.keys - (first_key - key_tile));
        pass_turn();
        ptx::wgmma_wait<0>();
        pin(output);
        arrive(Plan::kValuesEmpty + values.stage * 8);
        values.step();
        ++works;
    }

    // A warp's sixteen rows through shared memory, for whole 16-byte words of a row. Chunks of 16 bytes are swizzled by
    // row, so that the lanes of a store hit all banks.
    __device__ __forceinline__ void store(const Work& work, int unit, const Division& division, const Softmax& softmax,
                                          const Output& output) const {
        constexpr int kChunks = head_dim / 8, kBytes = head_dim * 2;
        const Lane lane;
        const uint32_t rows = base + Plan::kOutput + warp() * 16 * kBytes;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float inverse = softmax.inverse(row);
            const uint32_t to = rows + (lane.g + 8 * row) * kBytes + lane.t * 4;
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const float* pair = output + 4 * i + 2 * row;
                ptx::st_shared_b32(to + (i ^ lane.g) * 16,
                                   Scalar<T>::pack(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse)));
            }
        }
        __syncwarp();
        const int first = division.first_query(unit) + warp() % 4 * 16;
        T* out = static_cast<T*>(p.out) + static_cast<int64_t>(work.first_row + first) * p.out_stride +
                 division.q_head(work, unit) * head_dim;
#pragma unroll
        for (int i = 0; i < kChunks / 2; ++i) {
            const int row = (lane.index + i * kWarp) / kChunks, chunk = lane.index % kChunks;
            uint32_t word[4];
            ptx::ld_shared_v4_b32(word, rows + row * kBytes + (chunk ^ row % 8) * 16);
            if (first + row < work.length) {
                *reinterpret_cast<uint4*>(out + row * p.out_stride + chunk * 8) =
                    make_uint4(word[0], word[1], word[2], word[3]);
            }
        }
        __syncwarp();  // the next unit's rows go to the same place
    }

    __device__ __forceinline__ void run() {
        const Division division{p};
        if (warpgroup == 1) pass_turn();
        Work work;
        for (int index = blockIdx.x; division.find(index, work); index += gridDim.x) {
            const int unit = division.unit(work, warpgroup), query = division.first_query(unit);
            Extent extent;
            extent.keys = division.keys(work);
            extent.unmasked = p.causal ? min(query + 1, extent.keys) : extent.keys;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int position = query + warp() % 4 * 16 + threadIdx.x % kWarp / 4 + 8 * row;
                extent.last[row] = min(p.causal ? position : extent.keys, extent.keys - 1);
            }
            Softmax softmax{__fmul_rn(p.scale, 1.44269504f)};
            Output output;
#pragma unroll
            for (int i = 0; i < head_dim / 2; ++i) output[i] = 0.0f;
            attend(extent, softmax, output);
            store(work, unit, division, softmax, output);
        }
        if (warpgroup == 0) take_turn();  // the turn that nobody takes
    }
};

}  // namespace omniw4::attention
