// How the packed sequences are divided among blocks.
//
// A unit is 64 query rows of one head, counted from the start of a sequence; the work of a block is two units of one
// key head, one for each of its warpgroups. The units of a key head are counted with its query heads first: with two
// query heads to a key head, both take the same rows; with one, a head takes rows 0..63 and 64..127. How a sequence is
// divided does not depend on its place in the pack or on its neighbours.
#pragma once

#include "../common/fragment.cuh"
#include "../omniw4.h"

namespace omniw4::attention {

constexpr int kUnitRows = 64;

__host__ __device__ constexpr int64_t pairs_of(int64_t length, int group) {
    return ceil_div(ceil_div(length, kUnitRows) * group, 2);
}

// One block's work. Rows count from the start of the pack.
struct Work {
    int first_row, length;  // of the sequence
    int pair, kv_head;
};

struct Division {
    const AttentionVarlenParams& p;

    __device__ __forceinline__ int group() const { return p.q_heads / p.kv_heads; }
    __device__ __forceinline__ int unit(const Work& work, int warpgroup) const { return 2 * work.pair + warpgroup; }
    __device__ __forceinline__ int first_query(int unit) const { return unit / group() * kUnitRows; }
    __device__ __forceinline__ int q_head(const Work& work, int unit) const {
        return work.kv_head * group() + unit % group();
    }
    // Keys that both units of the block need, at least one.
    __device__ __forceinline__ int keys(const Work& work) const {
        return p.causal ? min(work.length, first_query(unit(work, 1)) + kUnitRows) : work.length;
    }

    // Work number `index`, if there is so much of it. All lanes of a warp call this; boundaries that make no sense give
    // rows inside the pack all the same. Causal: the longest work of a sequence comes first.
    __device__ __forceinline__ bool find(int index, Work& work) const {
        constexpr unsigned kAll = 0xffffffffu;
        const int lane = threadIdx.x % kWarp;
        const int wanted = index / p.kv_heads, rows = static_cast<int>(p.rows);
        int before = 0;
        for (int first = 0; first < p.sequences; first += kWarp) {
            const int sequence = first + lane;
            const bool exists = sequence < p.sequences;
            const int begin = exists ? min(max(p.cu_seqlens[sequence], 0), rows) : 0;
            const int end = exists ? min(max(p.cu_seqlens[sequence + 1], 0), rows) : 0;
            const int length = max(end - begin, 0), count = static_cast<int>(pairs_of(length, group()));
            int sum = before + count;  // with those of the lanes before
#pragma unroll
            for (int distance = 1; distance < kWarp; distance *= 2) {
                const int other = __shfl_up_sync(kAll, sum, distance);
                if (lane >= distance) sum += other - before;
            }
            const unsigned reach = __ballot_sync(kAll, sum > wanted);
            if (reach != 0) {
                const int owner = __ffs(reach) - 1;
                const int pair = wanted - __shfl_sync(kAll, sum - count, owner);
                work.first_row = __shfl_sync(kAll, begin, owner);
                work.length = __shfl_sync(kAll, length, owner);
                work.pair = p.causal ? __shfl_sync(kAll, count, owner) - 1 - pair : pair;
                work.kv_head = index % p.kv_heads;
                return true;
            }
            before = __shfl_sync(kAll, sum, kWarp - 1);
        }
        return false;
    }
};

}  // namespace omniw4::attention
