// Where a lane's part of a group goes in layout wgmma_s8 (docs/mma-layouts.md): the operand B of wgmma, token rows of 128
// bytes of K with their 16-byte chunks swizzled, so that the GEMM copies a tile as it is.
//
// Of sixteen tokens, 4t + 2h + e goes to row 8h + 2t + e, its slot: lane t of the GEMM then holds tokens 4t .. 4t + 3 in
// its accumulators. Rows past M are written too, as zeros, and so is the second group of the last 128 columns where K ends
// in the middle of them.
#pragma once

#include "../common/fragment.cuh"
#include "../common/scalar.cuh"
#include "../omniw4.h"

#include <cuda_fp16.h>

namespace omniw4::quantize {

struct WgmmaOutput {
    const QuantizeLoraDownParams& p;
    uint32_t padded_rows;

    __device__ __forceinline__ void store_token_scale(int64_t row, float scale) const {
        static_cast<float*>(p.a_scales)[row] = scale;
    }

    __device__ __forceinline__ void store_group_scale(int64_t row, int group, __half scale) const {
        float* pair = static_cast<float*>(p.a_scales) +
                      (group / 2 * int64_t{padded_rows} + row / kRowTile * kRowTile) * 2 + row % kRowTile;
        pair[group % 2 * kRowTile] = __half2float(scale);
    }

    // Where a row's codes begin, of the pair of groups that `group` belongs to; pairs are step_of_pairs() bytes apart.
    __device__ __forceinline__ uint8_t* codes_of(int row_tile, int slot, int group) const {
        const uint64_t line = static_cast<uint64_t>(group >> 1) * padded_rows + (row_tile * uint32_t{kRowTile} + slot);
        return static_cast<uint8_t*>(p.qact) + line * 128;
    }
    __device__ __forceinline__ uint64_t step_of_pairs() const { return padded_rows * uint64_t{128}; }

    // Where in these 128 bytes a lane's columns 8t .. 8t + 7 of a group go; columns 32 + 8t .. 32 + 8t + 7 go to this ^ 32,
    // and those of the other group of the pair to this ^ 64.
    static __device__ __forceinline__ uint32_t offset_of(int slot, int group, int t) {
        return (((group & 1) * 4 + (t >> 1)) ^ (slot & 7)) * 16 + (t & 1) * 8;
    }

    // A unit of lora_act: what lane `unit` % 32 holds of a product of 16 ranks and the eight tokens of half `unit` / 32
    // of a row tile, ranks in further steps of 64 units. Lanes four apart hold neighbouring ranks and exchange a token, so
    // that each has two neighbours of both core matrices of that half: eight tokens by eight ranks. All 32 lanes call
    // this, for 32 neighbouring units or eight.
    template <class T>
    __device__ __forceinline__ void store_lora(int row_tile, int unit, bool there, const float (&v)[4]) const {
        const int lane = unit % kWarp, rank = lane / 4, odd = rank % 2;
        const float got0 = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 4);
        const float got1 = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 4);
        if (!there) return;
        const int token = lane % 4 * 2 + odd;
        const int64_t n8 = int64_t{unit / (2 * kWarp)} * (padded_rows / 8) + row_tile * int64_t{2} + unit / kWarp % 2;
        uint32_t* const pair = reinterpret_cast<uint32_t*>(p.lora_act) + n8 * (2 * kWarp) + token * 4 + rank / 2;
        pair[0] = odd ? Scalar<T>::pack(got0, v[1]) : Scalar<T>::pack(v[0], got0);
        pair[kWarp] = odd ? Scalar<T>::pack(got1, v[3]) : Scalar<T>::pack(v[2], got1);
    }
};

}  // namespace omniw4::quantize
