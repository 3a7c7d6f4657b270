// RMSNorm and rotary embedding of one head, eight columns a lane; shared by the op and by the GEMM's epilogue, so that
// both give the same bits.
#pragma once

#include "../omniw4.h"
#include "scalar.cuh"

#include <cmath>

namespace omniw4 {

// Cosines and sines of one row's position for the eight columns of a lane.
struct Rotation {
    int64_t position;
    float4 cos[2], sin[2];

    // Reads them for `position`; outside the table they are NaN.
    template <int kHeadDim = 0>
    __device__ __forceinline__ void load(const QkNormRopeParams& p) {
        const int head_dim = kHeadDim > 0 ? kHeadDim : p.head_dim;
        const bool inside = position >= 0 && position < p.table_rows;
        const int64_t entry = (inside ? position : 0) * (head_dim / 2) + (threadIdx.x % (head_dim / 16)) * 8;
        const float4 none = make_float4(NAN, NAN, NAN, NAN);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cos[i] = inside ? reinterpret_cast<const float4*>(p.cos + entry)[i] : none;
            sin[i] = inside ? reinterpret_cast<const float4*>(p.sin + entry)[i] : none;
        }
    }
};

// v: columns 8i..8i+7 of a head, i = lane % (head_dim / 8). All 32 lanes call it; lanes of one head are neighbours.
// kHeadDim: p.head_dim where it is known when compiling, else 0.
template <class T, int kHeadDim = 0>
__device__ __forceinline__ void qknorm_rope_head(const QkNormRopeParams& p, const Rotation& rotation, bool is_query,
                                                 float (&v)[8]) {
    const int head_dim = kHeadDim > 0 ? kHeadDim : p.head_dim;
    const int lanes = head_dim / 8, i = threadIdx.x % lanes;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    for (int mask = 1; mask < lanes; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));

    const void* weight = is_query ? p.q_weight : p.k_weight;
    if (weight != nullptr) {
        const float mean = __fdiv_rn(sum, static_cast<float>(head_dim));
        const float inv_rms = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
        float w[8];
        unpack8<T>(static_cast<const uint4*>(weight)[i], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = round_to<T>(__fmul_rn(round_to<T>(__fmul_rn(v[j], inv_rms)), w[j]));
    }

    const float4 low_cos = rotation.cos[0], high_cos = rotation.cos[1];
    const float4 low_sin = rotation.sin[0], high_sin = rotation.sin[1];
    const float c[8] = {low_cos.x, low_cos.y, low_cos.z, low_cos.w, high_cos.x, high_cos.y, high_cos.z, high_cos.w};
    const float s[8] = {low_sin.x, low_sin.y, low_sin.z, low_sin.w, high_sin.x, high_sin.y, high_sin.z, high_sin.w};
    const float sign =
        i < lanes / 2 ? -1.0f : 1.0f;  // out[j] = n[j] c - n[j + D/2] s; out[j + D/2] = n[j + D/2] c + n[j] s
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float other = __shfl_xor_sync(0xffffffffu, v[j], lanes / 2);
        v[j] = __fadd_rn(__fmul_rn(v[j], c[j]), sign * __fmul_rn(other, s[j]));
    }
}

template <class T, int kHeadDim = 0>
__device__ __forceinline__ void qknorm_rope_head(const QkNormRopeParams& p, int64_t row, bool is_query, float (&v)[8]) {
    Rotation rotation;
    rotation.position = p.positions[row];
    rotation.load<kHeadDim>(p);
    qknorm_rope_head<T, kHeadDim>(p, rotation, is_query, v);
}

}  // namespace omniw4
