// From x' of a group to the bytes that the GEMM of layout wgmma_s8 reads.
#pragma once

#include "cut_sm90a.cuh"
#include "output_wgmma.cuh"

namespace omniw4::quantize::sm90a {

// Eight nibbles, two's complement, to eight bytes, each code times `scale`.
__device__ __forceinline__ uint2 widen_s4x8(uint32_t nibbles, uint32_t scale) {
    const uint32_t shifted = nibbles ^ 0x88888888u, offset = 0x80808080u - scale * 0x08080808u;
    const uint32_t even = ((shifted & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    const uint32_t odd = ((shifted >> 4 & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// What all groups of a token share: its scale, and a reciprocal that depends on the grid.
struct TokenScale {
    float scale = 0.0f, inverse = 0.0f;

    __device__ __forceinline__ TokenScale(const Scales& scales, float absmax) {
        if (scales.grid == Grid::kTokens8) {
            const __half half = scale_from_absmax(absmax, scales.factor);
            scale = __half2float(half);
            inverse = inverse_scale(half);
        } else if (scales.grid == Grid::kGroupsInteger) {
            scale = token_scale(absmax, scales.factor);
            inverse = __frcp_rn(scale);
        }
    }
};

__device__ __forceinline__ void encode_group(const Scales& scales, const TokenScale& of_token,
                                             const WgmmaOutput& output, int64_t row, int group, int t, float absmax,
                                             const float (&v)[16]) {
    uint2 codes[2];
    if (scales.grid == Grid::kTokens8) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            codes[h] =
                make_uint2(encode_s8x4(v + 8 * h, of_token.inverse), encode_s8x4(v + 8 * h + 4, of_token.inverse));
        }
    } else {
        uint32_t scale = 1;
        float inverse;
        if (scales.grid == Grid::kGroupsInteger) {
            const float whole = group_steps(absmax, of_token.scale, of_token.inverse, scales.share);
            const float step = __fmul_rn(of_token.scale, whole);
            inverse = step == 0.0f ? 0.0f : __frcp_rn(step);
            scale = static_cast<uint32_t>(whole);
        } else {
            const __half of_group = scale_from_absmax(absmax, scales.factor);
            inverse = inverse_scale(of_group);
            if (t == 0 && group < output.groups()) output.store_group_scale(row, group, of_group);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) codes[h] = widen_s4x8(encode_s4x8(v + 8 * h, inverse), scale);
    }
    output.store_codes(row, group, t, codes[0], codes[1]);
}

}  // namespace omniw4::quantize::sm90a
