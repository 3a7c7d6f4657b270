// A warp's share of the mma_s8 GEMM: products, scales, low-rank branch, bias.
//
// Weights are operand A. Their nibbles become bytes in registers, by masks and shifts, and never touch shared memory
// again; tokens are operand B, four registers of which (a whole group of eight tokens) are one ldmatrix.
#pragma once

#include "../common/scalar.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma_f16.cuh"
#include "../ptx/mma_s8.cuh"
#include "low_rank_sm80.cuh"
#include "pipeline_s8_sm80.cuh"

#include <cuda_fp16.h>
#include <type_traits>

namespace omniw4::gemm::s8 {

// A sum that starts from the bits of 1.5 * 2^23 is, read as a float, that number plus the sum (|sum| <= 2^20): a
// subtraction replaces the conversion.
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;

// Four codes u = q + 8 in the low nibbles of a word to four bytes q * m: u * m + 128 - 8 m is at least 0 and at most 255
// for m up to 16, so no byte carries into the next, and flipping its highest bit subtracts the 128.
__device__ __forceinline__ uint32_t times(uint32_t nibbles, uint32_t scale, uint32_t offset) {
    return ((nibbles & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
}

template <class T, class Tile, class Scales>
struct Warp {
    using S = Stage<Tile, Scales>;
    using Sum = std::conditional_t<Scales::kInteger, int32_t, float>;
    // C fragments of m16n8 products, rows being features and columns tokens.
    template <class E>
    using Fragments = E[Tile::kM16][Tile::kN8][4];

    Lane lane;
    int m16, n8;  // first m16 and n8 tile of this warp within the block's tile

    __device__ __forceinline__ Warp() {
        const int warp = threadIdx.x / kWarp;
        m16 = warp / Tile::kWarpsT * Tile::kM16;
        n8 = warp % Tile::kWarpsT * Tile::kN8;
    }

    // Operand A of both k32 steps of a group. FP16 scales: bytes 16 q, and w_scale those of rows g and g + 8. Integer
    // scales: bytes m q.
    __device__ __forceinline__ void widen(const uint8_t* stage, int m, int group, uint32_t (&a)[2][4],
                                          float2& w_scale) const {
        const int tile = m16 + m, block = (tile / 4 * kStageGroups + group) * 4 + tile % 4;
        const uint4 raw = reinterpret_cast<const uint4*>(stage + S::kCodes)[block * kWarp + lane.index];
        const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
        const uint8_t* scales = stage + S::kWScales + (block * 8 + lane.g) * 2 * Scales::kWScaleBytes;
        if constexpr (Scales::kInteger) {
            const uint32_t pair = *reinterpret_cast<const uint16_t*>(scales);
            const uint32_t scale[2] = {pair & 0xff, pair >> 8};
            const uint32_t offset[2] = {0x80808080u - scale[0] * 0x08080808u, 0x80808080u - scale[1] * 0x08080808u};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[0][i] = times(word[i], scale[i % 2], offset[i % 2]);
                a[1][i] = times(word[i] >> 4, scale[i % 2], offset[i % 2]);
            }
        } else {
            w_scale = __half22float2(*reinterpret_cast<const __half2*>(scales));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[0][i] = word[i] << 4 & 0xf0f0f0f0u;
                a[1][i] = word[i] & 0xf0f0f0f0u;
            }
        }
    }

    // sums += one group of a stage.
    __device__ __forceinline__ void multiply(const uint8_t* stage, uint32_t address, int group,
                                             Fragments<Sum>& sums) const {
        uint32_t a[Tile::kM16][2][4];
        float2 w_scale[Tile::kM16];
#pragma unroll
        for (int m = 0; m < Tile::kM16; ++m) widen(stage, m, group, a[m], w_scale[m]);

        // Of ldmatrix, lanes 8i .. 8i + 7 point to chunk i of the eight tokens.
        const int row = lane.index % 8, chunk = group * (kGroup / 16) + lane.index / 8;
        const uint32_t tokens = address + S::kTokens + (n8 * 8 + row) * kRowBytes + (chunk ^ row) * 16;
#pragma unroll
        for (int n = 0; n < Tile::kN8; ++n) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, tokens + n * 8 * kRowBytes);
            if constexpr (Scales::kInteger) {
#pragma unroll
                for (int step = 0; step < 2; ++step) {
#pragma unroll
                    for (int m = 0; m < Tile::kM16; ++m) {
                        ptx::mma_m16n8k32_s8(sums[m][n], a[m][step], {b[2 * step], b[2 * step + 1]});
                    }
                }
            } else {
                float2 a_scale = make_float2(1.0f, 1.0f);
                if constexpr (Scales::kAScaleBytes > 0) {
                    const int first = group * Tile::kTokens + (n8 + n) * 8 + lane.t * 2;
                    a_scale = reinterpret_cast<const float2*>(stage + S::kAScales)[first / 2];
                }
                int32_t sum[Tile::kM16][4];
#pragma unroll
                for (int m = 0; m < Tile::kM16; ++m) ptx::mma_m16n8k32_s8(sum[m], a[m][0], {b[0], b[1]}, kMagicBits);
#pragma unroll
                for (int m = 0; m < Tile::kM16; ++m) {
                    ptx::mma_m16n8k32_s8(sum[m], a[m][1], {b[2], b[3]});
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float w = i < 2 ? w_scale[m].x : w_scale[m].y, x = i % 2 == 0 ? a_scale.x : a_scale.y;
                        const float scale = Scales::kTokenScale ? w : __fmul_rn(w, x);
                        float& c = sums[m][n][i];
                        c = __fmaf_rn(__fsub_rn(__int_as_float(sum[m][i]), kMagic), scale, c);
                    }
                }
            }
        }
    }

    // What remains to be multiplied in after the last group: 1/16 for bytes 16 q, scales of features and tokens.
    __device__ __forceinline__ void finish(const Block<Tile, Scales>& block, const Fragments<Sum>& sums,
                                           Fragments<float>& acc) const {
        const GemmLoraUpParams& p = block.p;
        const int64_t padded = round_up(p.rows, kRowTile);
        float row_scale[Tile::kM16][2];
        if constexpr (Scales::kInteger) {
#pragma unroll
            for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const int feature = block.first_feature + (m16 + m) * 16 + high * 8 + lane.g;
                    row_scale[m][high] = feature < p.out_features ? p.row_scales[feature] : 0.0f;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < Tile::kN8; ++n) {
            float2 token_scale = make_float2(1.0f, 1.0f);
            if constexpr (Scales::kTokenScale) {
                const int64_t token = block.first_token + (n8 + n) * 8 + lane.t * 2;
                const float2* source = reinterpret_cast<const float2*>(static_cast<const float*>(p.a_scales) + token);
                token_scale = token < padded ? *source : make_float2(0.0f, 0.0f);
            }
#pragma unroll
            for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& c = acc[m][n][i];
                    if constexpr (Scales::kInteger) {
                        c = __fmul_rn(__int2float_rn(sums[m][n][i]), row_scale[m][i / 2]);
                    } else {
                        c = __fmul_rn(sums[m][n][i], 0.0625f);
                    }
                    if constexpr (Scales::kTokenScale) c = __fmul_rn(c, i % 2 == 0 ? token_scale.x : token_scale.y);
                }
            }
        }
    }

    // acc += proj_up * lora_act^T, in registers.
    __device__ __forceinline__ void add_low_rank(const Block<Tile, Scales>& block, Fragments<float>& acc) const {
        const GemmLoraUpParams& p = block.p;
#pragma unroll 1
        for (int step = 0; step < p.rank / kRowTile; ++step) {
            uint32_t a[Tile::kM16][4];
#pragma unroll
            for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int64_t feature = block.first_feature + (m16 + m) * 16 + i % 2 * 8 + lane.g;
                    const T* source =
                        static_cast<const T*>(p.proj_up) + feature * p.rank + step * kRowTile + lane.t * 2 + i / 2 * 8;
                    a[m][i] = feature < p.out_features ? *reinterpret_cast<const uint32_t*>(source) : 0;
                }
            }
#pragma unroll
            for (int n = 0; n < Tile::kN8; n += 2) {
                uint32_t x[4];
                load_lora_act<T>(p, block.first_token / kRowTile + (n8 + n) / 2, step, lane, x);
#pragma unroll
                for (int m = 0; m < Tile::kM16; ++m) {
                    ptx::mma_m16n8k16<T>(acc[m][n], a[m], {x[0], x[2]});
                    ptx::mma_m16n8k16<T>(acc[m][n + 1], a[m], {x[1], x[3]});
                }
            }
        }
    }

    __device__ __forceinline__ void add_bias(const Block<Tile, Scales>& block, Fragments<float>& acc) const {
        const GemmLoraUpParams& p = block.p;
        if (p.bias == nullptr) return;
#pragma unroll
        for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int feature = block.first_feature + (m16 + m) * 16 + high * 8 + lane.g;
                const T* bias = static_cast<const T*>(p.bias) + feature;
                const float value = feature < p.out_features ? Scalar<T>::to_float(*bias) : 0.0f;
#pragma unroll
                for (int n = 0; n < Tile::kN8; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        acc[m][n][2 * high + i] = __fadd_rn(acc[m][n][2 * high + i], value);
                    }
                }
            }
        }
    }

    // The block's tile, [token][feature].
    __device__ __forceinline__ void put(float* tile, const Fragments<float>& acc) const {
#pragma unroll
        for (int n = 0; n < Tile::kN8; ++n) {
#pragma unroll
            for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = (n8 + n) * 8 + lane.t * 2 + i % 2, feature = (m16 + m) * 16 + i / 2 * 8 + lane.g;
                    tile[token * Tile::kPitch + feature] = acc[m][n][i];
                }
            }
        }
    }
};

}  // namespace omniw4::gemm::s8
