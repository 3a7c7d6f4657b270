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

struct WgmmaOutput {
    const QuantizeLoraDownParams& p;
    int64_t padded_rows;

    __device__ __forceinline__ int groups() const { return p.cols / kGroup; }

    __device__ __forceinline__ void store_token_scale(int64_t row, float scale) const {
        static_cast<float*>(p.a_scales)[row] = scale;
    }

    __device__ __forceinline__ void store_group_scale(int64_t row, int group, __half scale) const {
        float* pair = static_cast<float*>(p.a_scales) + (group / 2 * padded_rows + row / kRowTile * kRowTile) * 2 +
                      row % kRowTile;
        pair[group % 2 * kRowTile] = __half2float(scale);
        if (group % 2 == 0 && group + 1 == groups()) pair[kRowTile] = 0.0f;
    }

    // Columns 8t .. 8t + 7 (low) and 32 + 8t .. 32 + 8t + 7 (high) of a group. Lanes 2i and 2i + 1 exchange halves, so
    // that each stores 16 bytes; all 32 lanes call this.
    __device__ __forceinline__ void store_codes(int64_t row, int group, int t, uint2 low, uint2 high) const {
        const bool odd = t % 2 == 1;
        const uint2 give = odd ? low : high;
        const uint2 got = make_uint2(__shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1));
        if (group >= groups()) return;
        const int token = static_cast<int>(row % kRowTile);
        const int64_t place = row - token + token / 2 % 2 * 8 + token / 4 * 2 + token % 2;
        uint4* line = static_cast<uint4*>(p.qact) + (group / 2 * padded_rows + place) * 8;
        const int chunk = group % 2 * 4 + (odd ? 2 : 0) + t / 2, swizzle = static_cast<int>(place % 8);
        line[chunk ^ swizzle] = odd ? make_uint4(got.x, got.y, high.x, high.y) : make_uint4(low.x, low.y, got.x, got.y);
        if (group % 2 == 0 && group + 1 == groups()) line[(chunk + 4) ^ swizzle] = make_uint4(0, 0, 0, 0);
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
};

}  // namespace omniw4::quantize
