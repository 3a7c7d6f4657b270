// From x' of a group to the bytes that the GEMM of layout wgmma_s8 reads.
#pragma once

#include "../ptx/rcp_approx.cuh"
#include "cut_sm90a.cuh"

namespace omniw4::quantize::sm90a {

// 1 / x to the last bit, as __frcp_rn has it, for x and 1 / x between 2^-126 and 2^126: one Newton step, its residual
// exact. NaN for zero, infinity and NaN.
__device__ __forceinline__ float reciprocal_of_normal(float x) {
    const float r = ptx::rcp_approx(x);
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// Largest magnitude of the sixteen values a lane holds.
__device__ __forceinline__ float absmax_tree(const float (&v)[16]) {
    float m[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) m[i] = ptx::max_nan(fabsf(v[i]), fabsf(v[i + 8]));
#pragma unroll
    for (int width = 4; width > 0; width /= 2) {
#pragma unroll
        for (int i = 0; i < width; ++i) m[i] = ptx::max_nan(m[i], m[i + width]);
    }
    return m[0];
}

// Two codes as 16-bit halves: the sum with 1.5 * 2^23 rounds half to even and leaves an integer in its low bits.
__device__ __forceinline__ uint32_t code_pair(float a, float b, float inverse) {
    constexpr float kRound = 12582912.0f;
    return __byte_perm(__float_as_uint(__fadd_rn(__fmul_rn(a, inverse), kRound)),
                       __float_as_uint(__fadd_rn(__fmul_rn(b, inverse), kRound)), 0x5410);
}

// Clamps to [-half, half - 1], and returns each half's code + `half`.
__device__ __forceinline__ uint32_t clamp_pair(uint32_t codes, uint32_t half) {
    return __viaddmin_s16x2_relu(codes, half * 0x00010001u, (2 * half - 1) * 0x00010001u);
}

// Products beyond all codes, NaN among them, to values whose codes are the same and fit 16 bits.
__device__ __forceinline__ void tame(float (&v)[16], float& inverse) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float y = __fmul_rn(v[i], inverse);
        v[i] = y == y ? fminf(fmaxf(y, -1024.0f), 1024.0f) : 0.0f;
    }
    inverse = 1.0f;
}

// What all groups of a token share: its scale, and a reciprocal that depends on the grid.
template <Grid grid>
struct TokenScale {
    float absmax, scale,
        inverse;  // scale: at least kTokenScaleMin with integer group scales, so that inverse is finite

    __device__ __forceinline__ TokenScale(const Scales& scales, float largest) : absmax(largest) {
        if constexpr (grid == Grid::kTokens8) {
            const __half half = scale_from_absmax(absmax, scales.factor);
            scale = __half2float(half);
            inverse = inverse_scale(half);
        } else {
            scale = ptx::max_nan(__fmul_rn(absmax, scales.factor), kTokenScaleMin);
            inverse = reciprocal_of_normal(scale);
        }
    }

    __device__ __forceinline__ float stored() const { return absmax == 0.0f ? 0.0f : scale; }
};

// Codes of a lane's columns 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7, each times `scale`, which 4-bit grids have.
template <Grid grid>
__device__ __forceinline__ void encode16(const float (&v)[16], float inverse, uint32_t scale, uint2 (&codes)[2]) {
    constexpr uint32_t kHalf = grid == Grid::kTokens8 ? 128 : 8;
    const uint32_t offset = (256 - kHalf * scale) * 0x00010001u;  // no half goes below zero
    uint32_t pair[8], word[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        pair[i] = clamp_pair(code_pair(v[2 * i], v[2 * i + 1], inverse), kHalf) * scale + offset;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = __byte_perm(pair[2 * i], pair[2 * i + 1], 0x6420);
    codes[0] = make_uint2(word[0], word[1]);
    codes[1] = make_uint2(word[2], word[3]);
}

// What encoding a group takes; whole: its integer, with kWild where its values need taming.
struct GroupScale {
    static constexpr uint32_t kWild = 256;
    float inverse;
    uint32_t whole;
    __half stored;  // with FP16 group scales
};

template <Grid grid>
__device__ __forceinline__ GroupScale group_scale(const Scales& scales, const TokenScale<grid>& of_token,
                                                  float absmax) {
    GroupScale group{of_token.inverse, 1, {}};
    if constexpr (grid == Grid::kGroupsInteger) {
        // group_steps() of int4.cuh; in an all-zero token the integer may be any
        constexpr float kRound = 12582912.0f;
        const float steps = __fmul_rn(__fmul_rn(absmax, of_token.inverse), scales.share);
        const float rounded = __fadd_rn(fminf(fmaxf(steps, 1.0f), static_cast<float>(kIntegerScaleMax)), kRound);
        group.whole = __float_as_uint(rounded) & 31;
        group.inverse = reciprocal_of_normal(__fmul_rn(of_token.scale, __fsub_rn(rounded, kRound)));
    } else if constexpr (grid == Grid::kGroups16) {
        group.stored = scale_from_absmax(absmax, scales.factor);
        group.inverse = inverse_scale(group.stored);
    }
    const float largest = grid == Grid::kGroups16 ? absmax : of_token.absmax;
    if (!(largest < scales.limit)) group.whole |= GroupScale::kWild;
    return group;
}

// Codes of a group, times its integer where it has one.
template <Grid grid>
__device__ __forceinline__ void encode_group(float inverse, uint32_t whole, float (&v)[16], uint2 (&codes)[2]) {
    if (whole & GroupScale::kWild) tame(v, inverse);
    encode16<grid>(v, inverse, whole % GroupScale::kWild, codes);
}

}  // namespace omniw4::quantize::sm90a
