#pragma once

#include "fragment.cuh"

namespace omniw4 {

namespace detail {

template <int stride>
__device__ __forceinline__ void butterfly_registers(float (&v)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if ((i & stride) == 0) {
            const float a = v[i], b = v[i + stride];
            v[i] = __fadd_rn(a, b);
            v[i + stride] = __fsub_rn(a, b);
        }
    }
}

// The lane whose mask bit is clear holds a and keeps a + b; its partner holds b and keeps a - b.
template <int mask>
__device__ __forceinline__ void butterfly_lanes(float (&v)[16], int t) {
    const float sign = (t & mask) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, v[i], mask);
        v[i] = __fmaf_rn(v[i], sign, other);  // the product is exact, so this rounds once, as an addition does
    }
}

}  // namespace detail

// One group of 64 times H64, spread over the four lanes t = 0..3: v[8h + j] is column 32h + 8t + j.
// Strides 1, 2, 4, 8, 16, 32 in this order, then an exact 1/8: the same bits as omniw4.hadamard.
__device__ __forceinline__ void hadamard64(float (&v)[16], int t) {
    detail::butterfly_registers<1>(v);
    detail::butterfly_registers<2>(v);
    detail::butterfly_registers<4>(v);
    detail::butterfly_lanes<1>(v, t);
    detail::butterfly_lanes<2>(v, t);
    detail::butterfly_registers<8>(v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], 0.125f);
}

// The same, the last stride and the 1/8 in one: the bits of hadamard64 wherever that is below 2^125 and not so small that
// 1/8 of an intermediate sum is subnormal. From 2^125 on, where hadamard64 is infinite, this is not.
__device__ __forceinline__ void hadamard64_below_2_125(float (&v)[16], int t) {
    detail::butterfly_registers<1>(v);
    detail::butterfly_registers<2>(v);
    detail::butterfly_registers<4>(v);
    detail::butterfly_lanes<1>(v, t);
    detail::butterfly_lanes<2>(v, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float a = v[i], eighth = __fmul_rn(v[i + 8], 0.125f);
        v[i] = __fmaf_rn(a, 0.125f, eighth);
        v[i + 8] = __fmaf_rn(a, 0.125f, -eighth);
    }
}

}  // namespace omniw4
