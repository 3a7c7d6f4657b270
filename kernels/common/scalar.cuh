// 16-bit floats: conversion with IEEE rounding, pairs as 32-bit registers, eight as one 16-byte access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

namespace omniw4 {

template <class T>
struct Scalar;

template <>
struct Scalar<__half> {
    static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t pair) {
        return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    }
    // Two products, each rounded once, as FP32 products rounded to this type are: those are exact.
    static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
        const __half2 c = __hmul2_rn(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
        return *reinterpret_cast<const uint32_t*>(&c);
    }
};

template <>
struct Scalar<__nv_bfloat16> {
    static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t pair) {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
    }
    static __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
        const __nv_bfloat162 c =
            __hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
        return *reinterpret_cast<const uint32_t*>(&c);
    }
};

// x rounded to T and back: what a store to memory and a load would do.
template <class T>
__device__ __forceinline__ float round_to(float x) {
    return Scalar<T>::to_float(Scalar<T>::from_float(x));
}

// Eight elements of T from one 16-byte load.
template <class T>
__device__ __forceinline__ void unpack8(const uint4& raw, float* v) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = Scalar<T>::unpack(words[i]);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

template <class T>
__device__ __forceinline__ uint4 pack8(const float* v) {
    return make_uint4(Scalar<T>::pack(v[0], v[1]), Scalar<T>::pack(v[2], v[3]), Scalar<T>::pack(v[4], v[5]),
                      Scalar<T>::pack(v[6], v[7]));
}

}  // namespace omniw4
