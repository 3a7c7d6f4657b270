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

#include "../common/fragment.cuh"
#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "../ptx/bulk_copy.cuh"
#include "../ptx/mma_f16.cuh"
#include "../ptx/pdl.cuh"
#include "output_wgmma.cuh"
#include "transform.cuh"

namespace omniw4::quantize::sm90a {

constexpr int kQuads = 8;
constexpr int kTree = 8;                        // groups whose low-rank products are added in a tree
constexpr int kMaxGroups = 512;                 // of a row
constexpr int kMostShared = 160 * 1024;         // bytes a block takes at most: of that many groups
constexpr int kFragmentBytes = 4 * kWarp * 16;  // proj_down of one group and sixteen ranks

enum class Grid { kGroups16, kGroupsInteger, kTokens8 };  // what shares a scale, and what it is

// How a kernel is cut: rows a block owns, steps a warp holds, n16 tiles of the rank a block multiplies; kReload: nothing
// is held, a warp takes the steps of kTree groups at a time, and rows are read again.
template <int tokens, int steps, int tiles, bool reload>
struct Cut {
    static constexpr int kTokens = tokens, kSteps = steps, kTiles = tiles;
    static constexpr bool kReload = reload;
    static constexpr int kStepGroups = kQuads / tokens;
    // Groups whose products become one entry of shared memory, a power of two up to kTree; entries of a warp's steps.
    static constexpr int kEntryGroups = steps * kStepGroups < kTree ? steps * kStepGroups : kTree;
    static constexpr int kEntrySteps = kEntryGroups / kStepGroups > 0 ? kEntryGroups / kStepGroups : 1;
    static constexpr int kEntries = steps / kEntrySteps;
    static_assert(!reload || kEntries == 1);
    // Registers a thread: where little is held, more warps share a multiprocessor.
    static constexpr int kMaxWarps = tokens == 1 ? 8 : 16;
    static constexpr int kRegisters = tokens == 1 ? 200 : tiles == 1 && steps <= 2 ? 64 : 128;
};

// Arguments beside the parameters: factor and share are clip over the spans of the grids.
struct Scales {
    Grid grid;
    float factor, share;
};

__device__ __forceinline__ float sum_over_quad(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// 1 / RMS of a row from the sums of squares of its groups, `stride` floats apart: chain t adds groups t, t + 4, ...
template <int stride>
__device__ __forceinline__ float inverse_rms(const float* sums, int groups, int t, float eps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int group = t; group < groups; group += 4) sum = __fadd_rn(sum, sums[group * stride]);
    const float mean = __fdiv_rn(sum_over_quad(sum), static_cast<float>(groups * kGroup));
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

__device__ __forceinline__ void add(float (&a)[4], const float (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = __fadd_rn(a[i], b[i]);
}

// One block's rows.
template <class T, class Cut>
struct Rows {
    static constexpr int kTokens = Cut::kTokens, kSteps = Cut::kSteps, kTiles = Cut::kTiles;

    const QuantizeLoraDownParams& p;
    int t, token, sub;  // of four lanes; which row, and which of a step's groups this quad has
    int64_t row;
    const T* x;  // the lane's first column
    int groups;

    __device__ __forceinline__ explicit Rows(const QuantizeLoraDownParams& params)
        : p(params),
          t(threadIdx.x % 4),
          token(threadIdx.x % kWarp / 4 % kTokens),
          sub(threadIdx.x % kWarp / 4 / kTokens),
          row(static_cast<int64_t>(blockIdx.x) * kTokens + token),
          x(static_cast<const T*>(p.x) + row * p.row_stride + t * 8),
          groups(p.cols / kGroup) {}

    __device__ __forceinline__ int group(int step) const { return step * Cut::kStepGroups + sub; }

    __device__ __forceinline__ void load(int group, uint4 (&raw)[2]) const {
        const bool there = row < p.rows && group < groups;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            raw[h] = there ? *reinterpret_cast<const uint4*>(x + group * kGroup + h * 32) : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ float squares(const uint4 (&raw)[2]) const {
        float v[16], sum = 0.0f;
        unpack8<T>(raw[0], v);
        unpack8<T>(raw[1], v + 8);
#pragma unroll
        for (int j = 0; j < 16; ++j) sum = __fmaf_rn(v[j], v[j], sum);
        return sum_over_quad(sum);
    }

    __device__ __forceinline__ void transform(int group, float inv_rms, const uint4 (&raw)[2], float (&v)[16]) const {
        unpack8<T>(raw[0], v);
        unpack8<T>(raw[1], v + 8);
        transform_row<T>(p, min(group, groups - 1) * kGroup + t * 8, t, inv_rms, v);
    }

    // x' times proj_down over one step's groups. Registers 0, 1: rank lane / 4 of columns 2t, 2t + 1; 2, 3: rank + 8.
    // Columns of one token become one, in a tree.
    __device__ __forceinline__ void multiply_down(int step, int tile, const float (&v)[16], float (&sum)[4]) const {
        constexpr int kMost = kTiles == 1 ? 4 : 2, kAtOnce = Cut::kStepGroups < kMost ? Cut::kStepGroups : kMost;
        uint32_t b[4][2];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int i = 0; i < 2; ++i) b[s][i] = Scalar<T>::pack(v[4 * s + 2 * i], v[4 * s + 2 * i + 1]);
        }
        const int tiles = p.rank / kRowTile;
        const uint4* down = static_cast<const uint4*>(p.proj_down) + tile * (4 * kWarp) + threadIdx.x % kWarp;
        float acc[kAtOnce][4] = {};
#pragma unroll
        for (int first = 0; first < Cut::kStepGroups; first += kAtOnce) {
            uint4 a[kAtOnce][4];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int group = min(step * Cut::kStepGroups + first + i, groups - 1);  // past the last: times zeros
#pragma unroll
                for (int s = 0; s < 4; ++s) a[i][s] = __ldg(down + (group * tiles * 4 + s) * kWarp);
            }
#pragma unroll
            for (int s = 0; s < 4; ++s) {
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const bool mine = Cut::kStepGroups == 1 || (sub == first + i && group(step) < groups);
                    ptx::mma_m16n8k16<T>(acc[i], {a[i][s].x, a[i][s].y, a[i][s].z, a[i][s].w},
                                         {mine ? b[s][0] : 0, mine ? b[s][1] : 0});
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = acc[0][i];
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) add(sum, acc[i]);  // of each column all but one are zero
        if constexpr (kTokens == 1) {
            sum[0] = __fadd_rn(sum[0], sum[1]);
            sum[2] = __fadd_rn(sum[2], sum[3]);
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) {
            if (2 * mask < kTokens) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], mask));
        }
    }

    // To partial[entry][tile][token][16 ranks].
    __device__ __forceinline__ void leave(float* partial, int entry, int tile, const float (&sum)[4]) const {
        const int lane = threadIdx.x % kWarp, first = lane % 4 * 2;
        float* out = partial + (entry * kTiles + tile) * kTokens * kRowTile + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (first + i >= kTokens) break;
            out[(first + i) * kRowTile] = sum[i];
            out[(first + i) * kRowTile + 8] = sum[2 + i];
        }
    }

    __device__ __forceinline__ void store_low_rank(const WgmmaOutput& output, const float* partial, int entries,
                                                   int first_tile, int tiles) const {
        constexpr int kStride = kTiles * kTokens * kRowTile, kBranches = kTree / Cut::kEntryGroups;
        for (int i = threadIdx.x; i < kTokens * tiles * (kRowTile / 2); i += blockDim.x) {
            const int pair = i % (kRowTile / 2), of_token = i / (kRowTile / 2) % kTokens;
            const int tile = i / (kRowTile / 2) / kTokens;
            const float* from = partial + (tile * kTokens + of_token) * kRowTile + pair * 2;
            float total[2] = {0.0f, 0.0f};
            for (int first = 0; first < entries; first += kBranches) {
                float2 v[kBranches];
#pragma unroll
                for (int j = 0; j < kBranches; ++j) {
                    v[j] = first + j < entries ? *reinterpret_cast<const float2*>(from + (first + j) * kStride)
                                               : make_float2(0.0f, 0.0f);
                }
#pragma unroll
                for (int width = 1; width < kBranches; width *= 2) {
#pragma unroll
                    for (int j = 0; j < kBranches; j += 2 * width) {
                        v[j].x = __fadd_rn(v[j].x, v[j + width].x);
                        v[j].y = __fadd_rn(v[j].y, v[j + width].y);
                    }
                }
                total[0] = __fadd_rn(total[0], v[0].x);
                total[1] = __fadd_rn(total[1], v[0].y);
            }
            output.template store_lora<T>(static_cast<int64_t>(blockIdx.x) * kTokens + of_token,
                                          (first_tile + tile) * kRowTile + pair * 2, total[0], total[1]);
        }
    }
};

// Eight nibbles, two's complement, to eight bytes, each code times `scale`.
__device__ __forceinline__ uint2 widen_s4x8(uint32_t nibbles, uint32_t scale) {
    const uint32_t shifted = nibbles ^ 0x88888888u, offset = 0x80808080u - scale * 0x08080808u;
    const uint32_t even = ((shifted & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    const uint32_t odd = ((shifted >> 4 & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// What all groups of a token share: its scale, and a reciprocal that depends on the grid.
struct TokenScale {
    float scale = 0.0f, inverse = 0.0f;

    __device__ __forceinline__ TokenScale(const Scales& scales, float absmax) {
        if (scales.grid == Grid::kTokens8) {
            const __half half = scale_from_absmax(absmax, scales.factor);
            scale = __half2float(half);
            inverse = inverse_scale(half);
        } else if (scales.grid == Grid::kGroupsInteger) {
            scale = token_scale(absmax, scales.factor);
            inverse = __frcp_rn(scale);
        }
    }
};

__device__ __forceinline__ void encode_group(const Scales& scales, const TokenScale& of_token,
                                             const WgmmaOutput& output, int64_t row, int group, int t, float absmax,
                                             const float (&v)[16]) {
    uint2 codes[2];
    if (scales.grid == Grid::kTokens8) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            codes[h] =
                make_uint2(encode_s8x4(v + 8 * h, of_token.inverse), encode_s8x4(v + 8 * h + 4, of_token.inverse));
        }
    } else {
        uint32_t scale = 1;
        float inverse;
        if (scales.grid == Grid::kGroupsInteger) {
            const float whole = group_steps(absmax, of_token.scale, of_token.inverse, scales.share);
            const float step = __fmul_rn(of_token.scale, whole);
            inverse = step == 0.0f ? 0.0f : __frcp_rn(step);
            scale = static_cast<uint32_t>(whole);
        } else {
            const __half of_group = scale_from_absmax(absmax, scales.factor);
            inverse = inverse_scale(of_group);
            if (t == 0 && group < output.groups()) output.store_group_scale(row, group, of_group);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) codes[h] = widen_s4x8(encode_s4x8(v + 8 * h, inverse), scale);
    }
    output.store_codes(row, group, t, codes[0], codes[1]);
}

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
            for (int level = 0; level < 3; ++level) {
                if ((in_entry >> level & 1) == 0) {
                    if (in_entry + (1 << level) - 1 >= kEntrySteps - 1 && (kEntrySteps >> level) == 1) break;
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[tile][level][j] = sum[j];
                    break;
                }
                float left[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) left[j] = __fadd_rn(sums[tile][level][j], sum[j]);
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[j] = left[j];
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
