// Where a lane's part of a group goes in layout wgmma_s8 (docs/mma-layouts.md): the operand B of wgmma, token rows of 128
// bytes of K with their 16-byte chunks swizzled, so that the GEMM copies a tile as it is.
//
// Of sixteen tokens, 4t + 2h + e goes to row 8h + 2t + e: lane t of the GEMM then holds tokens 4t .. 4t + 3 in its
// accumulators. Rows past M are written too, as zeros, and so is the second group of the last 128 columns where K ends
// in the middle of them.
#pragma once

#include "../common/fragment.cuh"
#include "../common/int4.cuh"
#include "../common/scalar.cuh"
#include "../omniw4.h"

namespace omniw4::quantize {

// Eight nibbles, two's complement, to eight bytes.
__device__ __forceinline__ uint2 widen_s4x8(uint32_t nibbles) {
    uint32_t even = nibbles & 0x0f0f0f0fu, odd = nibbles >> 4 & 0x0f0f0f0fu;
    even |= (even & 0x08080808u) * 30;  // 0x08 * 30 = 0xf0: the sign, four times
    odd |= (odd & 0x08080808u) * 30;
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

struct WgmmaOutput {
    const QuantizeLoraDownParams& p;
    int64_t padded_rows;

    __device__ __forceinline__ int groups() const { return p.cols / kGroup; }

    __device__ __forceinline__ void store_scale(int64_t row, int group, __half scale) const {
        float* scales = static_cast<float*>(p.a_scales);
        if (p.act_bits == 8) {
            scales[row] = __half2float(scale);
            return;
        }
        float* pair = scales + (group / 2 * padded_rows + row / kRowTile * kRowTile) * 2 + row % kRowTile;
        pair[group % 2 * kRowTile] = __half2float(scale);
        if (group % 2 == 0 && group + 1 == groups()) pair[kRowTile] = 0.0f;
    }

    // Columns 8t .. 8t + 7 (low) and 32 + 8t .. 32 + 8t + 7 (high) of a group.
    __device__ __forceinline__ void store_codes(int64_t row, int group, int t, uint2 low, uint2 high) const {
        const int token = static_cast<int>(row % kRowTile);
        const int64_t place = row - token + token / 2 % 2 * 8 + token / 4 * 2 + token % 2;
        uint8_t* line = static_cast<uint8_t*>(p.qact) + (group / 2 * padded_rows + place) * 128;
        store_pair(line, static_cast<int>(place % 8), group % 2, t, low, high);
        if (group % 2 == 0 && group + 1 == groups()) {
            store_pair(line, static_cast<int>(place % 8), 1, t, make_uint2(0, 0), make_uint2(0, 0));
        }
    }

    // Two neighbouring elements of lora_act, as half a register of the operand B of mma.m16n8k16.
    template <class T>
    __device__ __forceinline__ void store_lora(int64_t row, int column, float first, float second) const {
        const int token = static_cast<int>(row % kRowTile), k = column % 16;
        const int64_t n8 = row / kRowTile * 2 + token / 2 % 2;
        const int lane = (token / 4 * 2 + token % 2) * 4 + k % 8 / 2;
        const int64_t index = ((column / 16 * (padded_rows / 8) + n8) * kWarp + lane) * 2 + k / 8;
        reinterpret_cast<uint32_t*>(p.lora_act)[index] = Scalar<T>::pack(first, second);
    }

  private:
    static __device__ __forceinline__ void store_pair(uint8_t* line, int swizzle, int half, int t, uint2 low,
                                                      uint2 high) {
        const int chunk = half * 4 + t / 2, within = t % 2 * 8;
        *reinterpret_cast<uint2*>(line + (chunk ^ swizzle) * 16 + within) = low;
        *reinterpret_cast<uint2*>(line + ((chunk + 2) ^ swizzle) * 16 + within) = high;
    }
};

}  // namespace omniw4::quantize
