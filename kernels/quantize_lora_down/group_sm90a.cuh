// A warp's groups on their way through the quantizer of layout wgmma_s8: squares, x', the low-rank product.
#pragma once

#include "../common/hadamard.cuh"
#include "../common/scalar.cuh"
#include "../ptx/mma_f16.cuh"
#include "../ptx/shared_memory.cuh"
#include "cut_sm90a.cuh"

namespace omniw4::quantize::sm90a {

__device__ __forceinline__ float sum_over_quad(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

template <class T>
__device__ __forceinline__ float squares_of_group(const uint4 (&raw)[2]) {
    float v[16], sum = 0.0f;
    unpack8<T>(raw[0], v);
    unpack8<T>(raw[1], v + 8);
#pragma unroll
    for (int j = 0; j < 16; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    return sum_over_quad(sum);
}

// 1 / RMS of a row from the sums of squares of its groups, kStride floats apart: chain t adds groups t, t + 4, ...
template <int kStride>
__device__ __forceinline__ float inverse_rms(const float* sums, int groups, int t, float eps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int group = t; group < groups; group += 4) sum = __fadd_rn(sum, sums[group * kStride]);
    const float mean = __fdiv_rn(sum_over_quad(sum), static_cast<float>(groups * kGroup));
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

// x' of one group. norm, smooth: shared addresses of the group's 64 weights (of T) and reciprocals (FP32).
template <class T, bool kNorm>
__device__ __forceinline__ void transform_group(const QuantizeLoraDownParams& p, uint32_t norm, uint32_t smooth, int t,
                                                float inv_rms, float (&v)[16]) {
    if constexpr (kNorm) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t w[4];
            ptx::ld_shared_v4_b32(w, norm + t * 16 + h * 64);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float* const u = v + 8 * h + 2 * j;
                const uint32_t n = Scalar<T>::pack(__fmul_rn(u[0], inv_rms), __fmul_rn(u[1], inv_rms));
                const float2 scaled = Scalar<T>::unpack(Scalar<T>::multiply(n, w[j]));
                u[0] = scaled.x;
                u[1] = scaled.y;
            }
        }
    }
    if (p.inv_smooth != nullptr) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            float s[4];
            ptx::ld_shared_v4_f32(s, smooth + t * 32 + q / 2 * 128 + q % 2 * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) v[4 * q + j] = __fmul_rn(v[4 * q + j], s[j]);
        }
    }
    if (p.rotate) hadamard64_below_2_125(v, t);
}

__device__ __forceinline__ void add(float (&a)[4], const float (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __fadd_rn(a[i], b[i]);
}

// x' of a run times sixteen columns of proj_down, groups added in a tree: mma.m16n8k16 with ranks as rows and tokens as
// columns. What a lane holds of x' is operand B as it is. `down`: shared address of the lane's first fragment, those of
// the next group `stride` bytes further; groups from `count` on do not exist.
template <class T, int kSteps>
__device__ __forceinline__ void multiply_down(const float (&v)[kSteps][16], uint32_t down, int stride, int count,
                                              float (&sum)[4]) {
    float left[2][4];  // waiting for their neighbours in the tree: of one group, of two
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float acc[4] = {};
        if (step < count) {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                uint32_t a[4];
                ptx::ld_shared_v4_b32(a, down + step * stride + s * (kWarp * 16));
                const float* const u = v[step] + 4 * s;
                ptx::mma_m16n8k16<T>(acc, a, {Scalar<T>::pack(u[0], u[1]), Scalar<T>::pack(u[2], u[3])});
            }
        }
        if (step % 2 == 0 && kSteps > 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) left[0][i] = acc[i];
            continue;
        }
        if (kSteps > 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[i] = __fadd_rn(left[0][i], acc[i]);
        }
        if (step == 1 && kSteps > 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) left[1][i] = acc[i];
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = kSteps > 2 ? __fadd_rn(left[1][i], acc[i]) : acc[i];
    }
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// The sum of the first `count` of `span` values, a power of two, in a tree; at(i) is value number i.
template <int span = kTree, class F>
__device__ __forceinline__ float4 sum_in_tree(int count, F&& at, int first = 0) {
    if constexpr (span == 1) {
        return first < count ? at(first) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    } else {
        const float4 low = sum_in_tree<span / 2>(count, at, first);
        return add(low, sum_in_tree<span / 2>(count, at, first + span / 2));
    }
}

}  // namespace omniw4::quantize::sm90a
