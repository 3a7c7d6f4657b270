// quantize_lora_down in layout wgmma_s8: one read of the rows, and few rows spread over many multiprocessors.
//
// Eight quads of a warp take eight (token, group) pairs at a time, a step: kTokens rows by 8 / kTokens groups of 64, so
// that one row alone still keeps a whole warp busy. A block owns kTokens whole rows. A token's scale is known only when its
// last group is: so a block holds all of x' in registers, kSteps steps a warp; or, where that is too much, reads and
// transforms its rows a second time.
//
// The low-rank product is mma.m16n8k16 with 16 ranks as rows and the quads' pairs as columns: what a lane holds of x' is
// operand B as it is, and operand A is proj_down in fragment order. Where the quads' groups differ, one product for each
// group sees the other columns as zeros.
//
// Whatever the number of tokens a block owns, a row's bits are the same: squares and low-rank products are summed within
// each group first, then over groups in an order of their own: the products in a tree over eight groups, and these one
// after the other; the squares in four chains.
#pragma once

#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "../ptx/bulk_copy.cuh"
#include "../ptx/pdl.cuh"
#include "encode_sm90a.cuh"
#include "rows_sm90a.cuh"

namespace omniw4::quantize::sm90a {

template <class T, class Cut>
__global__ void __launch_bounds__(Cut::kMaxWarps* kWarp) __maxnreg__(Cut::kRegisters)
    quantize_lora_down_kernel(const __grid_constant__ QuantizeLoraDownParams p, const Scales scales) {
    constexpr int kTokens = Cut::kTokens, kSteps = Cut::kSteps, kTiles = Cut::kTiles;
    extern __shared__ __align__(
        16) float shared[];  // squares or absmax [group][token], then the products' partial sums
    __shared__ float warp_absmax[Cut::kMaxWarps][kTokens];
    ptx::pdl_launch_dependents();
    const Rows<T, Cut> rows(p);
    const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, groups = rows.groups;
    const int steps = static_cast<int>(ceil_div(groups, Cut::kStepGroups));
    const int first_tile = blockIdx.y * kTiles, tiles = min(kTiles, p.rank / kRowTile - first_tile);
    float* const partial = shared + round_up(groups * kTokens, 4);
    if (p.rank > 0 && threadIdx.x % kWarp == 0) {  // towards L2 while the kernel before is busy; a hint, see bulk_copy
        const int group_bytes = p.rank / kRowTile * kFragmentBytes;
        for (int group = blockIdx.x * warps + warp; group < groups; group += gridDim.x * warps) {
            ptx::bulk_prefetch_l2(static_cast<const uint8_t*>(p.proj_down) + static_cast<int64_t>(group) * group_bytes,
                                  group_bytes);
        }
    }
    ptx::pdl_wait();

    const bool rms_inside = p.norm_weight != nullptr && p.inv_rms == nullptr;
    float inv_rms = p.inv_rms != nullptr && rows.row < p.rows ? p.inv_rms[rows.row] : 0.0f;
    float largest = 0.0f;
    uint4 raw[Cut::kReload ? 1 : kSteps][2];
    float v[Cut::kReload ? 1 : kSteps][16], absmax[Cut::kReload ? 1 : kSteps];
    // f(i, step): every step of this warp, i counting within a run of kSteps.
    const auto each_step = [&](auto&& f) {
        if constexpr (Cut::kReload) {
            for (int first = warp * kSteps; first < steps; first += warps * kSteps) {
#pragma unroll
                for (int i = 0; i < kSteps; ++i) f(i, first + i);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) f(i, warp * kSteps + i);
        }
    };
    if constexpr (!Cut::kReload) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) rows.load(rows.group(warp * kSteps + i), raw[i]);
    }
    if (rms_inside) {
        each_step([&](int i, int step) {
            const int group = rows.group(step), at = Cut::kReload ? 0 : i;
            if constexpr (Cut::kReload) rows.load(group, raw[0]);
            const float sum = rows.squares(raw[at]);
            if (rows.t == 0 && group < groups) shared[group * kTokens + rows.token] = sum;
        });
        __syncthreads();
        inv_rms = inverse_rms<kTokens>(shared + rows.token, groups, rows.t, p.eps);
        if constexpr (Cut::kReload) __syncthreads();  // absmax takes the place of the squares
    }

    float sums[kTiles][3][4];  // waiting for their neighbours in the tree: of one step, of two, of four
    each_step([&](int i, int step) {
        const int group = rows.group(step), at = Cut::kReload ? 0 : i;
        if constexpr (Cut::kReload) rows.load(group, raw[0]);
        rows.transform(group, inv_rms, raw[at], v[at]);
        absmax[at] = max_over_quad(absmax16(v[at]));
        if (group < groups) largest = ptx::max_nan(largest, absmax[at]);
        if constexpr (Cut::kReload) {
            if (rows.t == 0 && group < groups) shared[group * kTokens + rows.token] = absmax[0];
        }
        if (p.rank == 0) return;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (tile >= tiles) break;
            float sum[4];
            rows.multiply_down(step, first_tile + tile, v[at], sum);
            if (step >= steps) sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
            constexpr int kEntrySteps = Cut::kEntrySteps;
            const int in_entry = i % kEntrySteps;
#pragma unroll
            for (int level = 0; 1 << level < kEntrySteps; ++level) {
                float (&left)[4] = sums[tile][level];
                if ((in_entry >> level & 1) == 0) {  // waits for its neighbour
#pragma unroll
                    for (int j = 0; j < 4; ++j) left[j] = sum[j];
                    break;
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] = __fadd_rn(left[j], sum[j]);
            }
            if (in_entry == kEntrySteps - 1) rows.leave(partial, step / kEntrySteps, tile, sum);
        }
    });
    if (scales.grid != Grid::kGroups16) {
#pragma unroll
        for (int mask = 4 * kTokens; mask < kWarp; mask *= 2) {
            largest = ptx::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
        }
        if (rows.t == 0 && rows.sub == 0) warp_absmax[warp][rows.token] = largest;
    }
    __syncthreads();

    const WgmmaOutput output{p, round_up(p.rows, kRowTile)};
    if (blockIdx.y == 0) {
        if (scales.grid != Grid::kGroups16) {
            largest = warp_absmax[0][rows.token];
            for (int w = 1; w < warps; ++w) largest = ptx::max_nan(largest, warp_absmax[w][rows.token]);
        }
        const TokenScale of_token(scales, largest);
        if (scales.grid != Grid::kGroups16 && warp == 0 && rows.t == 0 && rows.sub == 0) {
            output.store_token_scale(rows.row, of_token.scale);
        }
        each_step([&](int i, int step) {
            const int group = rows.group(step), at = Cut::kReload ? 0 : i;
            if constexpr (Cut::kReload) {
                rows.load(group, raw[0]);
                rows.transform(group, inv_rms, raw[0], v[0]);
                absmax[0] = group < groups ? shared[group * kTokens + rows.token] : 0.0f;
            }
            encode_group(scales, of_token, output, rows.row, group, rows.t, absmax[at], v[at]);
        });
    }
    if (p.rank > 0) {
        const int entries = static_cast<int>(ceil_div(steps, Cut::kEntrySteps));
        rows.store_low_rank(output, partial, entries, first_tile, tiles);
    }
}

template <class Cut>
constexpr int shared_bytes(int groups, bool low_rank) {
    const int64_t entries = ceil_div(groups, Cut::kEntryGroups) + Cut::kEntries;
    const int64_t sums = low_rank ? entries * Cut::kTiles * Cut::kTokens * kRowTile : 0;
    return static_cast<int>((round_up(groups * Cut::kTokens, 4) + sums) * sizeof(float));
}

template <class T, class Cut>
Status launch(const QuantizeLoraDownParams& p, int warps, cudaStream_t stream) {
    const Grid grid = p.act_bits == 8 ? Grid::kTokens8 : p.integer_scales ? Grid::kGroupsInteger : Grid::kGroups16;
    const double span = grid == Grid::kTokens8 ? 127 : grid == Grid::kGroupsInteger ? 7 * kIntegerScaleMax : 7;
    const Scales scales{grid, static_cast<float>(p.clip / span), static_cast<float>(p.clip / 7)};
    constexpr auto kernel = quantize_lora_down_kernel<T, Cut>;
    if (const Status status = allow_shared_memory<kernel>(kMostShared); status != Status::kOk) return status;
    const int bytes = shared_bytes<Cut>(p.cols / kGroup, p.rank > 0);
    const dim3 blocks(static_cast<unsigned>(round_up(p.rows, kRowTile) / Cut::kTokens),
                      p.rank > 0 ? static_cast<unsigned>(ceil_div(p.rank / kRowTile, Cut::kTiles)) : 1);
    return launch_early(kernel, blocks, warps * kWarp, bytes, stream, p, scales);
}

// Kernels compiled. Blocks with more rows read proj_down less often, those with fewer spread few rows.
using Many = Cut<8, 4, 1, false>;
using ManyShort = Cut<8, 2, 1, false>;
using Some = Cut<4, 1, 1, false>;
using SomeLong = Cut<4, 4, 1, false>;
using Few = Cut<1, 1, 1, false>;
using FewLong = Cut<1, 4, 1, false>;
using Reload = Cut<8, 8, 1, true>;
using ManyWide = Cut<8, 2, 4, false>;
using SomeWide = Cut<4, 1, 4, false>;
using FewWide = Cut<1, 1, 4, false>;
using ReloadWide = Cut<8, 8, 4, true>;

template <class Cut>
constexpr int warps_for(int groups) {
    return static_cast<int>(ceil_div(ceil_div(groups, Cut::kStepGroups), Cut::kSteps));
}

template <class T>
Status launch_rank(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    const int groups = p.cols / kGroup;
    if (groups > kMaxGroups) return Status::kBadShape;
    const int64_t rows = round_up(p.rows, kRowTile);
    const auto run = [&](auto cut) {
        using Cut = decltype(cut);
        const int warps = Cut::kReload ? 8 : warps_for<Cut>(groups);
        return launch<T, Cut>(p, warps, stream);
    };
    const auto fits = [&](auto cut) { return warps_for<decltype(cut)>(groups) <= decltype(cut)::kMaxWarps; };
    const bool wide = p.rank > kRowTile;
    if (rows <= 128) {
        if (wide && fits(FewWide{})) return run(FewWide{});
        if (!wide && fits(Few{})) return run(Few{});
        if (!wide && fits(FewLong{})) return run(FewLong{});
    } else if (rows <= 1024) {
        if (wide && fits(SomeWide{})) return run(SomeWide{});
        if (!wide && fits(Some{})) return run(Some{});
        if (!wide && fits(SomeLong{})) return run(SomeLong{});
    }
    if (wide) return fits(ManyWide{}) ? run(ManyWide{}) : run(ReloadWide{});
    if (fits(ManyShort{}) && groups <= 16) return run(ManyShort{});
    return fits(Many{}) ? run(Many{}) : run(Reload{});
}

template <class T>
struct Kernels {
    template <class Cut>
    static Registration entry() {
        return registered<quantize_lora_down_kernel<T, Cut>>(Cut::kMaxWarps * kWarp, shared_bytes<Cut>(16, true));
    }
    Registration kernels[11] = {entry<Many>(),     entry<ManyShort>(), entry<Some>(),      entry<SomeLong>(),
                                entry<Few>(),      entry<FewLong>(),   entry<Reload>(),    entry<ManyWide>(),
                                entry<SomeWide>(), entry<FewWide>(),   entry<ReloadWide>()};
};

}  // namespace omniw4::quantize::sm90a
