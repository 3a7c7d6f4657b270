// lora_act on its way to the tensor cores, for the families of mma.sync.
#pragma once

#include "../common/fragment.cuh"
#include "../common/scalar.cuh"
#include "../omniw4.h"

namespace omniw4::gemm {

// Operand A of mma.m16n8k16: sixteen tokens, step `step` of the rank. As operand B, registers 0 and 2 are those of the
// first eight tokens, 1 and 3 those of the others. Tokens past M are zero.
template <class T>
__device__ __forceinline__ void load_lora_act(const GemmLoraUpParams& p, int64_t tile, int step, const Lane& lane,
                                              uint32_t (&a)[4]) {
    if (p.lora_act_packed) {
        const int64_t index = (tile * (p.rank / kRowTile) + step) * kWarp + lane.index;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 word = tile * kRowTile < p.rows ? static_cast<const uint4*>(p.lora_act)[index] : zero;
        a[0] = word.x;
        a[1] = word.y;
        a[2] = word.z;
        a[3] = word.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int64_t row = tile * kRowTile + lane.g + i % 2 * 8;
        const float* source =
            static_cast<const float*>(p.lora_act) + row * p.rank + step * kRowTile + lane.t * 2 + i / 2 * 8;
        const float2 pair = row < p.rows ? *reinterpret_cast<const float2*>(source) : make_float2(0.0f, 0.0f);
        a[i] = Scalar<T>::pack(pair.x, pair.y);
    }
}

}  // namespace omniw4::gemm
