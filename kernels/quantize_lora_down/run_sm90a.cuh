// What a warp of the quantizer of layout wgmma_s8 does with its run of groups, whoever else has the rest of the row: eight
// rows, a quad of lanes a row; a lane has columns 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7 of each group.
#pragma once

#include "../ptx/ld_global.cuh"
#include "encode_sm90a.cuh"
#include "group_sm90a.cuh"
#include "output_wgmma.cuh"

namespace omniw4::quantize::sm90a {

// Rows past the last and groups from `count` on are zero. first: column of the run's first group.
template <class T, int kSteps>
__device__ __forceinline__ void load_run(const QuantizeLoraDownParams& p, int64_t row, int first, int count, int t,
                                         uint4 (&raw)[kSteps][2]) {
    const T* const x = static_cast<const T*>(p.x) + row * p.row_stride + (first + t * 8);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) raw[i / 2][i % 2] = make_uint4(0, 0, 0, 0);
    if (row >= p.rows) return;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        if (i >= count) break;
        raw[i][0] = ptx::ld_global_once(x + i * kGroup);
        raw[i][1] = ptx::ld_global_once(x + i * kGroup + 32);
    }
}

// x' of a run, and absmax: `largest` of all steps, for the whole quad but with a scale a token, where it is the lane's
// own; `of_mine` of step t % kSteps. norm, smooth: shared addresses of the first group's.
template <class T, bool kNorm, Grid grid, int kSteps>
__device__ __forceinline__ void transform_run(const QuantizeLoraDownParams& p, uint32_t norm, uint32_t smooth,
                                              float ceiling, int count, int t, float inv_rms,
                                              const uint4 (&raw)[kSteps][2], float (&v)[kSteps][16], float& largest,
                                              float& of_mine) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        unpack8<T>(raw[i][0], v[i]);
        unpack8<T>(raw[i][1], v[i] + 8);
        if (i < count) {
            transform_group<T, kNorm>(p, norm + i * kGroup * 2, smooth + i * kGroup * 4, t, inv_rms, v[i]);
        }
        float absmax = absmax_tree(v[i]);
        if (grid != Grid::kTokens8) absmax = max_over_quad(absmax);
        if (absmax >= ceiling) absmax = __uint_as_float(0x7f800000);
        largest = i == 0 ? absmax : ptx::max_nan(largest, absmax);
        if (t % kSteps == i) of_mine = absmax;
    }
}

// Stores codes and scales of a run. largest: absmax of the token, where its groups share a scale. first: number of the
// run's first group, of `groups`.
template <Grid grid, int kSteps>
__device__ __forceinline__ void store_run(const WgmmaOutput& output, const Scales& scales, int row_tile, int slot,
                                          int64_t row, int first, int groups, int quad, int t, float largest,
                                          float of_mine, float (&v)[kSteps][16]) {
    const TokenScale<grid> of_token(scales, largest);
    const GroupScale mine = group_scale(scales, of_token, of_mine);
    if (grid != Grid::kGroups16 && first == 0 && t == 0) output.store_token_scale(row, of_token.stored());
    uint8_t* const codes_of_row = output.codes_of(row_tile, slot, first);
    const uint32_t offset = WgmmaOutput::offset_of(slot, first, t);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        uint2 codes[2];
        float inverse = mine.inverse;
        uint32_t whole = mine.whole;
        if (kSteps > 1 && grid != Grid::kTokens8) {
            inverse = __shfl_sync(0xffffffffu, inverse, quad * 4 + i);
            whole = __shfl_sync(0xffffffffu, whole, quad * 4 + i);
        }
        encode_group<grid>(inverse, whole, v[i], codes);
        if (first + i >= ((groups + 1) & ~1)) continue;
        uint8_t* const line = codes_of_row + i / 2 * output.step_of_pairs();
        *reinterpret_cast<uint2*>(line + (offset ^ i % 2 * 64)) = codes[0];
        *reinterpret_cast<uint2*>(line + (offset ^ i % 2 * 64 ^ 32)) = codes[1];
        if (grid == Grid::kGroups16 && t == i) output.store_group_scale(row, first + i, mine.stored);
    }
}

}  // namespace omniw4::quantize::sm90a
