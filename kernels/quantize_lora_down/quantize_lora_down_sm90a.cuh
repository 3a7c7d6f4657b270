// quantize_lora_down in layout wgmma_s8: one read of the rows, and few rows spread over many multiprocessors.
//
// Eight quads of a warp take eight (token, group) pairs at a time, a step: `tokens` rows by 8 / tokens groups of 64, so
// that one row alone still keeps a whole warp busy. A block owns `tokens` whole rows and holds all of x' in registers,
// kSteps steps a warp, because a token's scale is known only when its last group is.
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

constexpr int kMaxWarps = 16;
constexpr int kMaxPairs = kMaxWarps * 4 * 8;  // (token, group) pairs of a block
constexpr int kQuads = 8;
constexpr int kFragmentBytes = 4 * kWarp * 16;  // proj_down of one group and sixteen ranks

enum class Grid { kGroups16, kGroupsInteger, kTokens8 };  // what shares a scale, and what it is

// A quad's place in step s of the block.
struct Quad {
    int tokens, index, t;
    __device__ __forceinline__ explicit Quad(int tokens_of_block)
        : tokens(tokens_of_block), index(threadIdx.x % kWarp / 4), t(threadIdx.x % 4) {}
    __device__ __forceinline__ int token() const { return index & (tokens - 1); }
    __device__ __forceinline__ int group(int step) const { return (step * kQuads + index) / tokens; }
};

__device__ __forceinline__ float sum_over_quad(float v) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// 1 / RMS of a row from the sums of squares of its groups, `stride` floats apart: chain c adds groups c, c + 4, ...
__device__ __forceinline__ float inverse_rms(const float* sums, int stride, int groups, int t, float eps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int group = t; group < groups; group += 4) sum = __fadd_rn(sum, sums[group * stride]);
    const float mean = __fdiv_rn(sum_over_quad(sum), static_cast<float>(groups * kGroup));
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

// x' times proj_down for one step: partial sums over its groups to partial[step][token][tile][16 ranks].
template <class T, int kTiles, int kSlots>
__device__ __forceinline__ void multiply_down(const QuantizeLoraDownParams& p, const Quad& quad, int step,
                                              int first_tile, int tiles, const float (&v)[16], float* partial) {
    uint32_t x[4][2];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) x[s][i] = Scalar<T>::pack(v[4 * s + 2 * i], v[4 * s + 2 * i + 1]);
    }
    const int lane = threadIdx.x % kWarp, groups = p.cols / kGroup, slots = kQuads / quad.tokens;
    float acc[kTiles][4] = {};
#pragma unroll kSlots
    for (int slot = 0; slot < slots; ++slot) {
        const int group = step * slots + slot;
        if (group >= groups) continue;
        const bool mine = quad.index / quad.tokens == slot;
        const uint4* down = static_cast<const uint4*>(p.proj_down) +
                            (static_cast<int64_t>(group) * (p.rank / kRowTile) + first_tile) * (4 * kWarp) + lane;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (tile >= tiles) break;
            uint4 a[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) a[s] = down[(tile * 4 + s) * kWarp];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                ptx::mma_m16n8k16<T>(acc[tile], {a[s].x, a[s].y, a[s].z, a[s].w},
                                     {mine ? x[s][0] : 0, mine ? x[s][1] : 0});
            }
        }
    }
    // Registers 0, 1: rank lane / 4 of columns 2t, 2t + 1; 2, 3: rank + 8. Columns of one token become one, in a tree.
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        float (&c)[4] = acc[tile];
        if (quad.tokens == 1) {
            c[0] = __fadd_rn(c[0], c[1]);
            c[2] = __fadd_rn(c[2], c[3]);
        }
#pragma unroll
        for (int mask = 1; mask <= 2; mask *= 2) {
            if (2 * mask < quad.tokens) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) c[i] = __fadd_rn(c[i], __shfl_xor_sync(0xffffffffu, c[i], mask));
        }
        const int first = lane % 4 * 2, rank = lane / 4;
        float* out = partial + (step * quad.tokens * kTiles + tile) * kRowTile + rank;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (first + i >= quad.tokens) break;
            out[(first + i) * kTiles * kRowTile] = c[i];
            out[(first + i) * kTiles * kRowTile + 8] = c[2 + i];
        }
    }
}

// The sum of one token's partial sums, `stride` floats apart: `tokens` of them cover eight groups.
__device__ __forceinline__ float sum_of_steps(const float* partial, int stride, int steps, int tokens) {
    float total = 0.0f;
    for (int first = 0; first < steps; first += tokens) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < tokens && first + i < steps ? partial[(first + i) * stride] : 0.0f;
#pragma unroll
        for (int width = 1; width < 8; width *= 2) {
            if (width >= tokens) break;
#pragma unroll
            for (int i = 0; i < 8; i += 2 * width) v[i] = __fadd_rn(v[i], v[i + width]);
        }
        total = __fadd_rn(total, v[0]);
    }
    return total;
}

// Eight nibbles, two's complement, to eight bytes, each code times `scale`.
__device__ __forceinline__ uint2 widen_s4x8(uint32_t nibbles, uint32_t scale) {
    const uint32_t shifted = nibbles ^ 0x88888888u, offset = 0x80808080u - scale * 0x08080808u;
    const uint32_t even = ((shifted & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    const uint32_t odd = ((shifted >> 4 & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
    return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

// kTiles: n16 tiles of the rank that a block multiplies. kSlots: groups of a step whose proj_down is fetched together.
template <class T, int kSteps, int kTiles, int kSlots>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kSteps == 1 && kTiles == 1 && kSlots == 1 ? 2 : 1)
    quantize_lora_down_kernel(const __grid_constant__ QuantizeLoraDownParams p, const Grid grid, const float factor,
                              const float share, const int tokens) {
    extern __shared__ __align__(16) float partial[];  // of the low-rank product: [step][token][tile][16]
    __shared__ float squares[kMaxPairs];              // [group][token]
    __shared__ float warp_absmax[kMaxWarps][kQuads];
    ptx::pdl_launch_dependents();
    const Quad quad(tokens);
    const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp, groups = p.cols / kGroup;
    const int steps = static_cast<int>(ceil_div(groups * tokens, kQuads));
    const int first_tile = blockIdx.y * kTiles, tiles = min(kTiles, p.rank / kRowTile - first_tile);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * tokens + quad.token();
    if (p.rank > 0 && threadIdx.x % kWarp == 0) {  // towards L2 while the kernel before is busy; a hint, see bulk_copy
        const int group_bytes = p.rank / kRowTile * kFragmentBytes;
        for (int group = blockIdx.x * warps + warp; group < groups; group += gridDim.x * warps) {
            ptx::bulk_prefetch_l2(static_cast<const uint8_t*>(p.proj_down) + static_cast<int64_t>(group) * group_bytes,
                                  group_bytes);
        }
    }
    ptx::pdl_wait();

    uint4 raw[kSteps][2];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int group = quad.group(warp + i * warps);
        const T* x = static_cast<const T*>(p.x) + row * p.row_stride + group * kGroup + quad.t * 8;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool there = row < p.rows && group < groups;
            raw[i][h] = there ? *reinterpret_cast<const uint4*>(x + h * 32) : make_uint4(0, 0, 0, 0);
        }
    }
    float inv_rms = 0.0f;
    if (p.inv_rms != nullptr) {
        inv_rms = row < p.rows ? p.inv_rms[row] : 0.0f;
    } else if (p.norm_weight != nullptr) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            float v[16], sum = 0.0f;
            unpack8<T>(raw[i][0], v);
            unpack8<T>(raw[i][1], v + 8);
#pragma unroll
            for (int j = 0; j < 16; ++j) sum = __fmaf_rn(v[j], v[j], sum);
            sum = sum_over_quad(sum);
            const int group = quad.group(warp + i * warps);
            if (quad.t == 0 && group < groups) squares[group * tokens + quad.token()] = sum;
        }
        __syncthreads();
        inv_rms = inverse_rms(squares + quad.token(), tokens, groups, quad.t, p.eps);
    }

    float v[kSteps][16], absmax[kSteps], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int step = warp + i * warps, group = quad.group(step);
        unpack8<T>(raw[i][0], v[i]);
        unpack8<T>(raw[i][1], v[i] + 8);
        transform_row<T>(p, min(group, groups - 1) * kGroup + quad.t * 8, quad.t, inv_rms, v[i]);
        absmax[i] = max_over_quad(absmax16(v[i]));
        largest = ptx::max_nan(largest, absmax[i]);
        if (p.rank > 0 && step < steps)
            multiply_down<T, kTiles, kSlots>(p, quad, step, first_tile, tiles, v[i], partial);
    }
    if (grid != Grid::kGroups16) {
        for (int mask = 4 * tokens; mask < kWarp; mask *= 2) {
            largest = ptx::max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
        }
        if (quad.t == 0 && quad.index < tokens) warp_absmax[warp][quad.index] = largest;
    }
    if (grid != Grid::kGroups16 || p.rank > 0) __syncthreads();

    const WgmmaOutput output{p, round_up(p.rows, kRowTile)};
    if (blockIdx.y == 0) {
        float scale_of_token = 0.0f, inverse = 0.0f;
        if (grid != Grid::kGroups16) {
            largest = warp_absmax[0][quad.token()];
            for (int w = 1; w < warps; ++w) largest = ptx::max_nan(largest, warp_absmax[w][quad.token()]);
            if (grid == Grid::kTokens8) {
                const __half scale = scale_from_absmax(largest, factor);
                scale_of_token = __half2float(scale);
                inverse = inverse_scale(scale);
            } else {
                scale_of_token = token_scale(largest, factor);
            }
            if (warp == 0 && quad.t == 0 && quad.index < tokens) output.store_token_scale(row, scale_of_token);
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int group = quad.group(warp + i * warps);
            uint2 codes[2];
            if (grid == Grid::kTokens8) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    codes[h] = make_uint2(encode_s8x4(v[i] + 8 * h, inverse), encode_s8x4(v[i] + 8 * h + 4, inverse));
                }
            } else {
                uint32_t scale = 1;
                if (grid == Grid::kGroupsInteger) {
                    const float whole = group_steps(absmax[i], scale_of_token, share);
                    const float step = __fmul_rn(scale_of_token, whole);
                    inverse = step == 0.0f ? 0.0f : __frcp_rn(step);
                    scale = static_cast<uint32_t>(whole);
                } else {
                    const __half of_group = scale_from_absmax(absmax[i], factor);
                    inverse = inverse_scale(of_group);
                    if (quad.t == 0 && group < groups) output.store_group_scale(row, group, of_group);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) codes[h] = widen_s4x8(encode_s4x8(v[i] + 8 * h, inverse), scale);
            }
            output.store_codes(row, group, quad.t, codes[0], codes[1]);
        }
    }
    if (p.rank > 0) {
        for (int i = threadIdx.x; i < tokens * tiles * (kRowTile / 2); i += blockDim.x) {
            const int token = i % tokens, rank = i / tokens * 2;
            const int stride = tokens * kTiles * kRowTile;
            const float* from = partial + (token * kTiles * kRowTile) + rank;
            output.template store_lora<T>(static_cast<int64_t>(blockIdx.x) * tokens + token,
                                          first_tile * kRowTile + rank, sum_of_steps(from, stride, steps, tokens),
                                          sum_of_steps(from + 1, stride, steps, tokens));
        }
    }
}

// How a problem is cut: rows a block owns, its warps, the steps each holds, and the n16 tiles of a pass over the rank.
struct Cut {
    int tokens, warps, steps, tiles;
};

// As many rows a block as leave most multiprocessors a block, since every block reads all of proj_down; and no more
// (token, group) pairs than fit its registers. Warps first: they hide latency, and steps do not.
inline Cut cut(int64_t padded_rows, int groups, int tiles, int multiprocessors) {
    const bool wide = tiles > 1 && groups <= kMaxPairs / 2;
    const int pairs = wide ? kMaxPairs / 2 : kMaxPairs;
    int tokens = wide ? 4 : 8;
    while (tokens > 1 && (groups * tokens > pairs || padded_rows / tokens * 3 < multiprocessors * 2)) tokens /= 2;
    const int all = static_cast<int>(ceil_div(groups * tokens, kQuads));
    const int steps = all <= kMaxWarps ? 1 : all <= 2 * kMaxWarps ? 2 : 4;
    return {tokens, static_cast<int>(ceil_div(all, steps)), steps, wide ? 4 : 1};
}

template <class T, int kSteps, int kTiles, int kSlots>
Status launch(const QuantizeLoraDownParams& p, const Cut& c, cudaStream_t stream) {
    const Grid grid = p.act_bits == 8 ? Grid::kTokens8 : p.integer_scales ? Grid::kGroupsInteger : Grid::kGroups16;
    const double span = grid == Grid::kTokens8 ? 127 : grid == Grid::kGroupsInteger ? 7 * kIntegerScaleMax : 7;
    const auto factor = static_cast<float>(p.clip / span), share = static_cast<float>(p.clip / 7);
    const int64_t steps = ceil_div(p.cols / kGroup * c.tokens, kQuads);
    const auto bytes = p.rank > 0 ? static_cast<int>(steps * c.tokens * kTiles * kRowTile * sizeof(float)) : 0;
    const dim3 blocks(static_cast<unsigned>(round_up(p.rows, kRowTile) / c.tokens),
                      p.rank > 0 ? static_cast<unsigned>(ceil_div(p.rank / kRowTile, kTiles)) : 1);
    return launch_early(quantize_lora_down_kernel<T, kSteps, kTiles, kSlots>, blocks, c.warps * kWarp, bytes, stream, p,
                        grid, factor, share, c.tokens);
}

template <class T>
Status launch_rank(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        return Status::kLaunchFailed;
    }
    const int groups = p.cols / kGroup;
    if (groups > kMaxPairs) return Status::kBadShape;
    const Cut c = cut(round_up(p.rows, kRowTile), groups, p.rank / kRowTile, multiprocessors);
    if (c.tiles == 4) return c.steps == 1 ? launch<T, 1, 4, 1>(p, c, stream) : launch<T, 2, 4, 1>(p, c, stream);
    const bool few = c.tokens <= 2;
    if (c.steps == 1) return few ? launch<T, 1, 1, 4>(p, c, stream) : launch<T, 1, 1, 1>(p, c, stream);
    if (c.steps == 2) return few ? launch<T, 2, 1, 4>(p, c, stream) : launch<T, 2, 1, 1>(p, c, stream);
    return launch<T, 4, 1, 1>(p, c, stream);
}

template <class T>
struct Kernels {
    template <int kSteps, int kTiles, int kSlots>
    static Registration entry() {
        return registered<quantize_lora_down_kernel<T, kSteps, kTiles, kSlots>>(kMaxWarps * kWarp, 32 * 1024);
    }
    Registration kernels[7] = {entry<1, 1, 1>(), entry<1, 1, 4>(), entry<2, 1, 1>(), entry<2, 1, 4>(),
                               entry<4, 1, 1>(), entry<1, 4, 1>(), entry<2, 4, 1>()};
};

}  // namespace omniw4::quantize::sm90a
