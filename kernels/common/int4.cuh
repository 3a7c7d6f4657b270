// The integer semantics of omniw4.int4, bit for bit: scale, reciprocal, code.
#pragma once

#include "../ptx/cvt_pack.cuh"
#include "../ptx/max_nan.cuh"

#include <cuda_fp16.h>
#include <cstdint>

namespace omniw4 {

constexpr float kScaleMin = 6.103515625e-05f;  // smallest normal FP16
constexpr float kScaleMax = 65504.0f;          // largest finite FP16

// FP16 scale of a group; zero stays zero, NaN and inf stay. factor = float(clip / qmax).
__device__ __forceinline__ __half scale_from_absmax(float absmax, float factor) {
    float scale = fminf(fmaxf(__fmul_rn(absmax, factor), kScaleMin), kScaleMax);
    if (!isfinite(absmax)) scale = absmax;
    if (absmax == 0.0f) scale = 0.0f;
    return __float2half_rn(scale);
}

__device__ __forceinline__ float inverse_scale(__half scale) {
    const float s = __half2float(scale);
    return s == 0.0f ? 0.0f : __frcp_rn(s);
}

// Rounds half to even; NaN gives 0 and what is too large saturates, so that clamping to the grid comes out right.
__device__ __forceinline__ int32_t code(float x, float inverse) {
    return __float2int_rn(__fmul_rn(x, inverse));
}

// Eight INT4 codes in one register, the first in the lowest nibble.
__device__ __forceinline__ uint32_t encode_s4x8(const float* v, float inverse) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 6; i >= 0; i -= 2) word = ptx::cvt_pack_s4(code(v[i + 1], inverse), code(v[i], inverse), word);
    return word;
}

// Four INT8 codes in one register, the first in the lowest byte.
__device__ __forceinline__ uint32_t encode_s8x4(const float* v, float inverse) {
    const uint32_t high = ptx::cvt_pack_s8(code(v[3], inverse), code(v[2], inverse), 0);
    return ptx::cvt_pack_s8(code(v[1], inverse), code(v[0], inverse), high);
}

// Eight INT4 codes of a register to eight bytes in their order, each code times `scale`, which is at most 16.
__device__ __forceinline__ uint2 widen_s4x8(uint32_t nibbles, uint32_t scale) {
    const uint32_t shifted = nibbles ^ 0x88888888u;  // q + 8, so that no byte carries into the next
    const uint32_t offset = 0x80808080u - scale * 0x08080808u;
    const uint32_t even = ((shifted & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    const uint32_t odd = ((shifted >> 4 & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// With integer group scales, a group's step is the token's scale times a whole number from 1 to 16.
constexpr int kIntegerScaleMax = 16;
constexpr float kTokenScaleMin = 7.888609052210118e-31f;  // 2^-100: its reciprocal and products stay within FP32

// Scale of a token whose largest magnitude is `absmax`; zero stays zero, NaN and inf stay. factor = float(clip / 112).
__device__ __forceinline__ float token_scale(float absmax, float factor) {
    return absmax == 0.0f ? 0.0f : ptx::max_nan(__fmul_rn(absmax, factor), kTokenScaleMin);
}

// The whole number of a group, as a float; 0 in an all-zero token. share = float(clip / 7).
__device__ __forceinline__ float group_steps(float absmax, float token_scale, float inverse, float share) {
    const float steps = rintf(__fmul_rn(__fmul_rn(absmax, inverse), share));
    return token_scale == 0.0f ? 0.0f : fminf(fmaxf(steps, 1.0f), static_cast<float>(kIntegerScaleMax));
}

// Largest magnitude of the sixteen values a lane holds.
__device__ __forceinline__ float absmax16(const float (&v)[16]) {
    float m = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 16; ++i) m = ptx::max_nan(m, fabsf(v[i]));
    return m;
}

// Largest over the four lanes that share a row.
__device__ __forceinline__ float max_over_quad(float m) {
    m = ptx::max_nan(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return ptx::max_nan(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

}  // namespace omniw4
