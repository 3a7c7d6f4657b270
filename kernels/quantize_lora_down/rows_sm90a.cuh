// One block's rows on their way through the quantizer of layout wgmma_s8: loading, norm, x', the low-rank product.
#pragma once

#include "../ptx/mma_f16.cuh"
#include "cut_sm90a.cuh"
#include "output_wgmma.cuh"
#include "transform.cuh"

namespace omniw4::quantize::sm90a {

__device__ __forceinline__ float sum_over_quad(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// 1 / RMS of a row from the sums of squares of its groups, `stride` floats apart: chain t adds groups t, t + 4, ...
template <int stride>
__device__ __forceinline__ float inverse_rms(const float* sums, int groups, int t, float eps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int group = t; group < groups; group += 4) sum = __fadd_rn(sum, sums[group * stride]);
    const float mean = __fdiv_rn(sum_over_quad(sum), static_cast<float>(groups * kGroup));
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

__device__ __forceinline__ void add(float (&a)[4], const float (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __fadd_rn(a[i], b[i]);
}

// One block's rows.
template <class T, class Cut>
struct Rows {
    static constexpr int kTokens = Cut::kTokens, kSteps = Cut::kSteps, kTiles = Cut::kTiles;

    const QuantizeLoraDownParams& p;
    int t, token, sub;  // of four lanes; which row, and which of a step's groups this quad has
    int64_t row;
    const T* x;  // the lane's first column
    int groups;

    __device__ __forceinline__ explicit Rows(const QuantizeLoraDownParams& params)
        : p(params),
          t(threadIdx.x % 4),
          token(threadIdx.x % kWarp / 4 % kTokens),
          sub(threadIdx.x % kWarp / 4 / kTokens),
          row(static_cast<int64_t>(blockIdx.x) * kTokens + token),
          x(static_cast<const T*>(p.x) + row * p.row_stride + t * 8),
          groups(p.cols / kGroup) {}

    __device__ __forceinline__ int group(int step) const { return step * Cut::kStepGroups + sub; }

    __device__ __forceinline__ void load(int group, uint4 (&raw)[2]) const {
        const bool there = row < p.rows && group < groups;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            raw[h] = there ? *reinterpret_cast<const uint4*>(x + group * kGroup + h * 32) : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ float squares(const uint4 (&raw)[2]) const {
        float v[16], sum = 0.0f;
        unpack8<T>(raw[0], v);
        unpack8<T>(raw[1], v + 8);
#pragma unroll
        for (int j = 0; j < 16; ++j) sum = __fmaf_rn(v[j], v[j], sum);
        return sum_over_quad(sum);
    }

    __device__ __forceinline__ void transform(int group, float inv_rms, const uint4 (&raw)[2], float (&v)[16]) const {
        unpack8<T>(raw[0], v);
        unpack8<T>(raw[1], v + 8);
        transform_row<T>(p, min(group, groups - 1) * kGroup + t * 8, t, inv_rms, v);
    }

    // x' times proj_down over one step's groups. Registers 0, 1: rank lane / 4 of columns 2t, 2t + 1; 2, 3: rank + 8.
    // Columns of one token become one, in a tree.
    __device__ __forceinline__ void multiply_down(int step, int tile, const float (&v)[16], float (&sum)[4]) const {
        constexpr int kMost = kTiles == 1 ? 4 : 2, kAtOnce = Cut::kStepGroups < kMost ? Cut::kStepGroups : kMost;
        uint32_t b[4][2];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int i = 0; i < 2; ++i) b[s][i] = Scalar<T>::pack(v[4 * s + 2 * i], v[4 * s + 2 * i + 1]);
        }
        const int tiles = p.rank / kRowTile;
        const uint4* down = static_cast<const uint4*>(p.proj_down) + tile * (4 * kWarp) + threadIdx.x % kWarp;
        float acc[kAtOnce][4] = {};
#pragma unroll
        for (int first = 0; first < Cut::kStepGroups; first += kAtOnce) {
            uint4 a[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int group = min(step * Cut::kStepGroups + first + i, groups - 1);  // past the last: times zeros
#pragma unroll
                for (int s = 0; s < 4; ++s) a[i][s] = __ldg(down + (group * tiles * 4 + s) * kWarp);
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const bool mine = Cut::kStepGroups == 1 || (sub == first + i && group(step) < groups);
                    ptx::mma_m16n8k16<T>(acc[i], {a[i][s].x, a[i][s].y, a[i][s].z, a[i][s].w},
                                         {mine ? b[s][0] : 0, mine ? b[s][1] : 0});
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = acc[0][i];
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) add(sum, acc[i]);  // of each column all but one are zero
        if constexpr (kTokens == 1) {
            sum[0] = __fadd_rn(sum[0], sum[1]);
            sum[2] = __fadd_rn(sum[2], sum[3]);
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) {
            if (2 * mask < kTokens) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], mask));
        }
    }

    // To partial[entry][tile][token][16 ranks].
    __device__ __forceinline__ void leave(float* partial, int entry, int tile, const float (&sum)[4]) const {
        const int lane = threadIdx.x % kWarp, first = lane % 4 * 2;
        float* out = partial + (entry * kTiles + tile) * kTokens * kRowTile + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (first + i >= kTokens) break;
            out[(first + i) * kRowTile] = sum[i];
            out[(first + i) * kRowTile + 8] = sum[2 + i];
        }
    }

    __device__ __forceinline__ void store_low_rank(const WgmmaOutput& output, const float* partial, int entries,
                                                   int first_tile, int tiles) const {
        constexpr int kStride = kTiles * kTokens * kRowTile, kBranches = kTree / Cut::kEntryGroups;
        for (int i = threadIdx.x; i < kTokens * tiles * (kRowTile / 2); i += blockDim.x) {
            const int pair = i % (kRowTile / 2), of_token = i / (kRowTile / 2) % kTokens;
            const int tile = i / (kRowTile / 2) / kTokens;
            const float* from = partial + (tile * kTokens + of_token) * kRowTile + pair * 2;
            float total[2] = {0.0f, 0.0f};
            for (int first = 0; first < entries; first += kBranches) {
                float2 v[kBranches];
#pragma unroll
                for (int j = 0; j < kBranches; ++j) {
                    v[j] = first + j < entries ? *reinterpret_cast<const float2*>(from + (first + j) * kStride)
                                               : make_float2(0.0f, 0.0f);
                }
#pragma unroll
                for (int width = 1; width < kBranches; width *= 2) {
#pragma unroll
                    for (int j = 0; j < kBranches; j += 2 * width) {
                        v[j].x = __fadd_rn(v[j].x, v[j + width].x);
                        v[j].y = __fadd_rn(v[j].y, v[j + width].y);
                    }
                }
                total[0] = __fadd_rn(total[0], v[0].x);
                total[1] = __fadd_rn(total[1], v[0].y);
            }
            output.template store_lora<T>(static_cast<int64_t>(blockIdx.x) * kTokens + of_token,
                                          (first_tile + tile) * kRowTile + pair * 2, total[0], total[1]);
        }
    }
};

}  // namespace omniw4::quantize::sm90a
