// RMSNorm and rotary embedding of one head, eight columns a lane; shared by the op and by the GEMM's epilogue, so that
// both give the same bits.
#pragma once

#include "../omniw4.h"
#include "scalar.cuh"

#include <cmath>

namespace omniw4 {

// v: columns 8i..8i+7 of a head, i = lane % (head_dim / 8). All 32 lanes call it; lanes of one head are neighbours.
template <class T>
__device__ __forceinline__ void qknorm_rope_head(const QkNormRopeParams& p, int64_t row, bool is_query, float (&v)[8]) {
    const int lanes = p.head_dim / 8, i = threadIdx.x % lanes;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    for (int mask = 1; mask < lanes; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));

    const void* weight = is_query ? p.q_weight : p.k_weight;
    if (weight != nullptr) {
        const float mean = __fdiv_rn(sum, static_cast<float>(p.head_dim));
        const float inv_rms = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
        float w[8];
        unpack8<T>(static_cast<const uint4*>(weight)[i], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = round_to<T>(__fmul_rn(round_to<T>(__fmul_rn(v[j], inv_rms)), w[j]));
    }

    const int64_t position = p.positions[row];
    const bool inside = position >= 0 && position < p.table_rows;
    const int64_t entry = (inside ? position : 0) * (p.head_dim / 2) + (i % (lanes / 2)) * 8;
    const float sign =
        i < lanes / 2 ? -1.0f : 1.0f;  // out[j] = n[j] c - n[j + D/2] s; out[j + D/2] = n[j + D/2] c + n[j] s
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float other = __shfl_xor_sync(0xffffffffu, v[j], lanes / 2);
        const float c = inside ? p.cos[entry + j] : NAN, s = inside ? p.sin[entry + j] : NAN;
        v[j] = __fadd_rn(__fmul_rn(v[j], c), sign * __fmul_rn(other, s));
    }
}

}  // namespace omniw4
