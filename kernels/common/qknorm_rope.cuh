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
    bool inside;  // the table
    float4 cos[2], sin[2];

    template <int kHeadDim = 0>
    __device__ __forceinline__ void load(const QkNormRopeParams& p) {
        const uint32_t head_dim = kHeadDim > 0 ? kHeadDim : p.head_dim;
        inside = static_cast<uint64_t>(position) < static_cast<uint64_t>(p.table_rows);
        const uint64_t row = static_cast<uint64_t>(static_cast<uint32_t>(position)) * (head_dim / 2);
        const uint64_t entry = row + threadIdx.x % (head_dim / 16) * 8;
        const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            cos[i] = inside ? reinterpret_cast<const float4*>(p.cos + entry)[i] : none;
            sin[i] = inside ? reinterpret_cast<const float4*>(p.sin + entry)[i] : none;
        }
    }
};

// What follows has columns 8i..8i+7 of a head in a lane, i = lane % lanes, lanes = head_dim / 8, as a load gives them.
// All 32 lanes call it; lanes of one head are neighbours.

// Of a whole head, in each of its lanes.
template <class T>
__device__ __forceinline__ float head_squares(const uint4& x, int lanes) {
    float v[8], sum = 0.0f;
    unpack8<T>(x, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    for (int mask = 1; mask < lanes; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
    return sum;
}

// head_dim is a power of two, so that its reciprocal is exact.
__device__ __forceinline__ float head_inv_rms(float squares, int head_dim, float eps) {
    const float mean = __fmul_rn(squares, head_dim == 64 ? 1.0f / 64 : 1.0f / 128);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

template <class T>
__device__ __forceinline__ uint4 norm_head(const uint4& x, float inv_rms, const uint4& weight) {
    float v[8];
    unpack8<T>(x, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], inv_rms);
    const uint4 y = pack8<T>(v);
    return make_uint4(Scalar<T>::multiply(y.x, weight.x), Scalar<T>::multiply(y.y, weight.y),
                      Scalar<T>::multiply(y.z, weight.z), Scalar<T>::multiply(y.w, weight.w));
}

// out[j] = x[j] c - x[j + D/2] s; out[j + D/2] = x[j + D/2] c + x[j] s. NaN where the position is outside the table.
template <class T>
__device__ __forceinline__ uint4 rotate_head(const Rotation& rotation, uint4 x, int lanes) {
    if (!rotation.inside) x = make_uint4(0x7fff7fff, 0x7fff7fff, 0x7fff7fff, 0x7fff7fff);
    const uint32_t sign = threadIdx.x % lanes < lanes / 2 ? 0x80008000u : 0u;
    const auto across = [&](uint32_t pair) { return __shfl_xor_sync(0xffffffffu, pair, lanes / 2) ^ sign; };
    const uint4 other = make_uint4(across(x.x), across(x.y), across(x.z), across(x.w));
    float v[8], o[8];
    unpack8<T>(x, v);
    unpack8<T>(other, o);
    const float4 low_cos = rotation.cos[0], high_cos = rotation.cos[1];
    const float4 low_sin = rotation.sin[0], high_sin = rotation.sin[1];
    const float c[8] = {low_cos.x, low_cos.y, low_cos.z, low_cos.w, high_cos.x, high_cos.y, high_cos.z, high_cos.w};
    const float s[8] = {low_sin.x, low_sin.y, low_sin.z, low_sin.w, high_sin.x, high_sin.y, high_sin.z, high_sin.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(__fmul_rn(v[j], c[j]), __fmul_rn(o[j], s[j]));
    return pack8<T>(v);
}

// Norm and rotation of one row's head. kHeadDim: p.head_dim where it is known when compiling, else 0.
template <class T, int kHeadDim = 0>
__device__ __forceinline__ uint4 qknorm_rope_head(const QkNormRopeParams& p, int64_t row, bool is_query, uint4 x) {
    const int head_dim = kHeadDim > 0 ? kHeadDim : p.head_dim, lanes = head_dim / 8;
    Rotation rotation;
    rotation.position = p.positions[row];
    rotation.load<kHeadDim>(p);
    const float squares = head_squares<T>(x, lanes);
    const auto* weight = static_cast<const uint4*>(is_query ? p.q_weight : p.k_weight);
    if (weight != nullptr) x = norm_head<T>(x, head_inv_rms(squares, head_dim, p.eps), weight[threadIdx.x % lanes]);
    return rotate_head<T>(rotation, x, lanes);
}

}  // namespace omniw4
