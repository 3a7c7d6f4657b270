// Where codes and scales go, for every width and all layouts but wgmma_s8.
#pragma once

#include "../common/fragment.cuh"
#include "../common/int4.cuh"
#include "../common/scalar.cuh"
#include "../omniw4.h"

namespace omniw4::quantize {

// Where a lane's part of a group goes.
template <class T>
struct Output {
    const QuantizeLoraDownParams& p;
    int64_t padded_rows;

    __device__ __forceinline__ explicit Output(const QuantizeLoraDownParams& params)
        : p(params), padded_rows(round_up(params.rows, kRowTile)) {}

    // `scale` is an FP16 number but in kMmaS8.
    __device__ __forceinline__ void store_scale(int64_t row, int group, int groups, float scale) const {
        if (p.layout == Layout::kMmaS8) {
            static_cast<float*>(p.a_scales)[group * padded_rows + row] = scale;
            return;  // rows past M are written too: the GEMM reads whole tiles
        }
        __half* scales = static_cast<__half*>(p.a_scales);
        if (p.layout != Layout::kCanonical) {
            scales[group * padded_rows + row] = __float2half_rn(scale);
        } else if (row < p.rows) {
            scales[row * groups + group] = __float2half_rn(scale);
        }
    }

    __device__ __forceinline__ void store_s4(const int64_t (&row)[2], int group, const Lane& lane,
                                             const uint32_t (&word)[2][2]) const {
        const int groups = p.cols / kGroup;
        if (p.layout == Layout::kMmaS4) {
            const int64_t tile = static_cast<int64_t>(blockIdx.x) * groups + group;
            static_cast<uint4*>(p.qact)[tile * kWarp + lane.index] =
                make_uint4(word[0][0], word[1][0], word[0][1], word[1][1]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row[i] >= p.rows) continue;
            uint32_t* out = static_cast<uint32_t*>(p.qact) + (row[i] * groups + group) * 8 + lane.t;
            out[0] = word[i][0];
            out[4] = word[i][1];
        }
    }

    // Bytes of columns 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7.
    __device__ __forceinline__ void store_bytes(int64_t row, int group, const Lane& lane,
                                                const uint2 (&codes)[2]) const {
        if (row >= p.rows) return;
        uint2* out = reinterpret_cast<uint2*>(static_cast<int8_t*>(p.qact) + row * p.cols + group * kGroup);
        out[lane.t] = codes[0];
        out[4 + lane.t] = codes[1];
    }

    __device__ __forceinline__ void store_16(int64_t row, int group, const Lane& lane, const float (&v)[16]) const {
        if (row >= p.rows) return;
        uint4* out = reinterpret_cast<uint4*>(static_cast<T*>(p.qact) + row * p.cols + group * kGroup);
#pragma unroll
        for (int h = 0; h < 2; ++h) out[h * 4 + lane.t] = pack8<T>(v + 8 * h);
    }
};

}  // namespace omniw4::quantize
