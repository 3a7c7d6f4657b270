// From raw activations to x': norm, smoothing and rotation of one group, sixteen rows a warp.
#pragma once

#include "../common/fragment.cuh"
#include "../common/hadamard.cuh"
#include "../common/scalar.cuh"
#include "../omniw4.h"

namespace omniw4::quantize {

// Sixteen values a lane of rows g (0) and g + 8 (1).
using RowPair = float[2][16];

// Sixteen values a lane of one row's group, from raw elements to x'. `column`: the first of the lane's.
template <class T>
__device__ __forceinline__ void transform_row(const QuantizeLoraDownParams& p, int column, int t, float inv_rms,
                                              float (&v)[16]) {
    if (p.norm_weight != nullptr) {
        const T* weight = static_cast<const T*>(p.norm_weight) + column;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 raw = *reinterpret_cast<const uint4*>(weight + h * 32);
            const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
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
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const float4 s = *reinterpret_cast<const float4*>(p.inv_smooth + column + h * 32 + q * 4);
                float* u = v + 8 * h + 4 * q;
                u[0] = __fmul_rn(u[0], s.x);
                u[1] = __fmul_rn(u[1], s.y);
                u[2] = __fmul_rn(u[2], s.z);
                u[3] = __fmul_rn(u[3], s.w);
            }
        }
    }
    if (p.rotate) hadamard64(v, t);
}

// What the kernel needs to turn raw elements into x'.
template <class T>
struct Transform {
    const QuantizeLoraDownParams& p;
    int64_t row[2];
    float inv_rms[2];

    __device__ __forceinline__ Transform(const QuantizeLoraDownParams& params, const Lane& lane) : p(params) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row[i] = static_cast<int64_t>(blockIdx.x) * kRowTile + lane.g + 8 * i;
            inv_rms[i] = p.inv_rms != nullptr && row[i] < p.rows ? p.inv_rms[row[i]] : 0.0f;
        }
    }

    __device__ __forceinline__ void load(int group, const Lane& lane, uint4 (&raw)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const T* x = static_cast<const T*>(p.x) + row[i] * p.row_stride + group * kGroup + lane.t * 8;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                raw[i][h] = row[i] < p.rows ? *reinterpret_cast<const uint4*>(x + h * 32) : make_uint4(0, 0, 0, 0);
            }
        }
    }

    __device__ __forceinline__ void apply(int group, const Lane& lane, const uint4 (&raw)[2][2], RowPair& v) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) unpack8<T>(raw[i][h], v[i] + 8 * h);
        }
        const int column = group * kGroup + lane.t * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) transform_row<T>(p, column, lane.t, inv_rms[i], v[i]);
    }
};

}  // namespace omniw4::quantize
