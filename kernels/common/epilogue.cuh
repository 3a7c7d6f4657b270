// What becomes of the FP32 result before it is stored: policies, each for eight neighbouring columns of one row.
//
// A block hands its tile over in slices, so that neighbouring lanes hold neighbouring columns and stores are whole
// 16-byte words. All 32 lanes of a warp call apply(), also those past the edge; `inside` says which may touch memory.
#pragma once

#include "../omniw4.h"
#include "qknorm_rope.cuh"
#include "scalar.cuh"
#include "swiglu.cuh"

namespace omniw4::epilogue {

struct Plain {
    template <class T>
    static __device__ __forceinline__ void apply(const GemmLoraUpParams& p, int64_t row, int column, bool inside,
                                                 float (&v)[8]) {
        if (!inside) return;
        T* y = static_cast<T*>(p.y) + row * p.out_features + column;
        *reinterpret_cast<uint4*>(y) = pack8<T>(v);
    }
};

template <class T>
__device__ __forceinline__ void add8(float (&v)[8], const uint4& addend) {
    float r[8];
    unpack8<T>(addend, r);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(v[j], r[j]);
}

struct Residual {
    template <class T>
    static __device__ __forceinline__ void apply(const GemmLoraUpParams& p, int64_t row, int column, bool inside,
                                                 float (&v)[8]) {
        if (!inside) return;
        const int64_t offset = row * p.out_features + column;
        add8<T>(v, *reinterpret_cast<const uint4*>(static_cast<const T*>(p.residual) + offset));
        *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + offset) = pack8<T>(v);
    }
};

// Columns 2j and 2j + 1 are gate and up of feature j.
struct Swiglu {
    template <class T>
    static __device__ __forceinline__ void apply(const GemmLoraUpParams& p, int64_t row, int column, bool inside,
                                                 float (&v)[8]) {
        if (!inside) return;
        float h[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) h[j] = swiglu(v[2 * j], v[2 * j + 1]);
        T* y = static_cast<T*>(p.y) + row * (p.out_features / 2) + column / 2;
        *reinterpret_cast<uint2*>(y) = make_uint2(Scalar<T>::pack(h[0], h[1]), Scalar<T>::pack(h[2], h[3]));
    }
};

// The same bits as Plain followed by the op qknorm_rope. A tile is as wide as a head or twice as wide.
struct QkNormRope {
    template <class T>
    static __device__ __forceinline__ void apply(const GemmLoraUpParams& p, int64_t row, int column, bool inside,
                                                 float (&v)[8]) {
        const int head = column / p.heads.head_dim;
        const uint4 x = pack8<T>(v);
        const uint4 rotated = qknorm_rope_head<T>(p.heads, inside ? row : 0, head < p.heads.q_heads, x);
        if (!inside) return;
        T* y = static_cast<T*>(p.y) + row * p.out_features + column;
        *reinterpret_cast<uint4*>(y) = head < p.heads.q_heads + p.heads.kv_heads ? rotated : x;
    }
};

}  // namespace omniw4::epilogue
