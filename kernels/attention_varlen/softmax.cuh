// Softmax over the keys of a row, a tile at a time, in FP32. Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
//
// A lane holds elements of two rows, g and g + 8: s[4i], s[4i + 1] are columns 8i + 2t, 8i + 2t + 1 of the first,
// s[4i + 2], s[4i + 3] of the second.
#pragma once

#include "../common/fragment.cuh"
#include "../ptx/exp2.cuh"

#include <cmath>

namespace omniw4::attention {

struct Softmax {
    float scale_log2;                       // of scores, times log2(e)
    float top[2] = {-INFINITY, -INFINITY};  // largest score of each row so far
    float sum[2] = {0.0f, 0.0f};            // of this lane's exponentials
    float shrink[2] = {1.0f, 1.0f};         // what earlier sums are multiplied by since the last tile

    // Scores to exponentials. Masked: columns past the last ones of rows g and g + 8 count for nothing.
    template <bool masked, int count>
    __device__ __forceinline__ void tile(float (&s)[count], int last_low, int last_high) {
        if constexpr (masked) {
            const int column = threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (column + i / 4 * 8 + i % 2 > (i / 2 % 2 ? last_high : last_low)) s[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float even = s[2 * row], odd = s[2 * row + 1];  // two chains, for latency
#pragma unroll
            for (int i = 4; i < count; i += 4) {
                even = fmaxf(even, s[i + 2 * row]);
                odd = fmaxf(odd, s[i + 2 * row + 1]);
            }
            float high = fmaxf(even, odd);
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
            // Up to 2^8 may a probability grow before the row is scaled again; the last division makes up for it.
            const float growth = __fmul_rn(__fsub_rn(high, top[row]), scale_log2);
            const bool grows = growth > 8.0f;
            shrink[row] = grows ? ptx::exp2(-growth) : 1.0f;
            top[row] = grows ? high : top[row];
        }
        float sums[2][2];
        const float shift[2] = {__fmul_rn(top[0], scale_log2), __fmul_rn(top[1], scale_log2)};
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const int row = i / 2 % 2;
            s[i] = ptx::exp2(__fmaf_rn(s[i], scale_log2, -shift[row]));
            sums[row][i % 2] = i < 4 ? s[i] : __fadd_rn(sums[row][i % 2], s[i]);
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            sum[row] = __fmaf_rn(sum[row], shrink[row], __fadd_rn(sums[row][0], sums[row][1]));
        }
    }

    // Whether any row of this warp is to be scaled; the others' factor is 1, so that a row's bits depend on it alone.
    __device__ __forceinline__ bool shrinks() const {
        return __any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f);
    }

    // 1 / sum over the whole row.
    __device__ __forceinline__ float inverse(int row) const {
        float whole = sum[row];
        whole = __fadd_rn(whole, __shfl_xor_sync(0xffffffffu, whole, 1));
        whole = __fadd_rn(whole, __shfl_xor_sync(0xffffffffu, whole, 2));
        return __frcp_rn(whole);
    }
};

}  // namespace omniw4::attention
