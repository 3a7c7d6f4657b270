// quantize_lora_down: a block of eight warps owns sixteen whole rows; warp w takes groups w, w + 8, ... of K.
//
// A lane holds, of rows g and g + 8, columns 8t..8t+7 and 32+8t..32+8t+7 of the group: just what it must hand to
// mma.m16n8k64, so codes leave as one 16-byte store a lane, and just four neighbours exchange values for H64 and absmax.
// For x' * proj_down the same sixteen values are operand A of four mma.m16n8k16; which column sits in which slot of k
// is free as long as B agrees, and ldmatrix takes its rows from anywhere.
//
// Each warp sums the low-rank product over its own groups, and the eight sums are added in the order of the warps:
// no atomics, and nothing depends on the rows beside.
//
// Where a scale depends on the whole row, codes are written from a second reading of it, which comes from L2.
#pragma once

#include "../common/launch.h"
#include "../ptx/mma_f16.cuh"
#include "codes.cuh"
#include "proj_down_tile.cuh"
#include "transform.cuh"

namespace omniw4::quantize {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTilesAtOnce = 4;  // n16 tiles reduced between two barriers

template <class T, class Codes, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 0 ? Codes::kBlocks : 0)
    quantize_lora_down_kernel(const __grid_constant__ QuantizeLoraDownParams p, const Factors factors) {
    // Two staging buffers a warp, later the partial sums of kTilesAtOnce n16 tiles from every warp.
    constexpr int kSharedBytes = kTiles > 0 ? kWarps * 2 * kStageBytes : 16;
    static_assert(kTiles == 0 || kSharedBytes >= kWarps * kTilesAtOnce * kWarp * 8 * 4);
    __shared__ __align__(128) uint8_t shared[kSharedBytes];
    __shared__ float row_absmax[Codes::kWholeRow ? kWarps : 1][kRowTile];

    const Lane lane;
    const int warp = threadIdx.x / kWarp, groups = p.cols / kGroup;
    const int first_tile = blockIdx.y * kTiles;
    const int tiles = kTiles == 0 ? 0 : min(kTiles, p.rank / kRowTile - first_tile);
    const bool owns_codes = blockIdx.y == 0;
    const uint32_t stage = ptx::shared_address(shared) + warp * 2 * kStageBytes;
    const Transform<T> transform(p, lane);
    const Output<T> output(p);

    float acc[kTiles > 0 ? kTiles : 1][2][4] = {};
    float absmax[2] = {0.0f, 0.0f};
    int buffer = 0;
    uint4 raw[2][2];
    if (warp < groups) {
        transform.load(warp, lane, raw);
        if constexpr (kTiles > 0) {
            ProjDownTile::fetch<T>(stage, p, warp, first_tile, lane);
            ptx::cp_async_commit();
        }
    }
    for (int group = warp; group < groups; group += kWarps) {
        RowPair v;
        transform.apply(group, lane, raw, v);
        const int next = group + kWarps;
        if (next < groups) transform.load(next, lane, raw);

        if constexpr (Codes::kWholeRow) {
#pragma unroll
            for (int i = 0; i < 2; ++i) absmax[i] = ptx::max_nan(absmax[i], absmax16(v[i]));
        } else {
            Codes::store(output, transform.row, group, lane, v, factors, owns_codes);
        }

        if constexpr (kTiles > 0) {
            uint32_t a[4][4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    a[s][i] = Scalar<T>::pack(v[i][4 * s], v[i][4 * s + 1]);
                    a[s][i + 2] = Scalar<T>::pack(v[i][4 * s + 2], v[i][4 * s + 3]);
                }
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                if (tile >= tiles) break;
                const bool last = tile + 1 == tiles;
                if (!last || next < groups) {
                    ProjDownTile::fetch<T>(stage + (buffer ^ 1) * kStageBytes, p, last ? next : group,
                                           first_tile + (last ? 0 : tile + 1), lane);
                }
                ptx::cp_async_commit();
                ptx::cp_async_wait<1>();
                __syncwarp();
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    uint32_t b[4];
                    ProjDownTile::operand(stage + buffer * kStageBytes, s, lane, b);
                    ptx::mma_m16n8k16<T>(acc[tile][0], a[s], {b[0], b[1]});
                    ptx::mma_m16n8k16<T>(acc[tile][1], a[s], {b[2], b[3]});
                }
                __syncwarp();  // the next fetch overwrites what other lanes may still read
                buffer ^= 1;
            }
        }
    }

    if constexpr (Codes::kWholeRow) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            absmax[i] = max_over_quad(absmax[i]);
            if (lane.t == 0) row_absmax[warp][lane.g + 8 * i] = absmax[i];
        }
        __syncthreads();
        if (owns_codes) {
            typename Codes::Row of_row[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float m = row_absmax[0][lane.g + 8 * i];
                for (int w = 1; w < kWarps; ++w) m = ptx::max_nan(m, row_absmax[w][lane.g + 8 * i]);
                of_row[i] = Codes::row(m, factors);
                if (warp == 0 && lane.t == 0) output.store_scale(transform.row[i], 0, 1, of_row[i].scale);
            }
            for (int group = warp; group < groups; group += kWarps) {
                RowPair v;
                transform.load(group, lane, raw);
                transform.apply(group, lane, raw, v);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Codes::store(output, transform.row[i], group, lane, v[i], of_row[i], factors);
                }
            }
        }
    }

    if constexpr (kTiles > 0) {
        float4* partial = reinterpret_cast<float4*>(shared);  // [warp][tile][n8][lane]
#pragma unroll
        for (int first = 0; first < kTiles; first += kTilesAtOnce) {
            if (first >= tiles) break;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kTilesAtOnce && first + i < kTiles; ++i) {
#pragma unroll
                for (int n8 = 0; n8 < 2; ++n8) {
                    const float (&c)[4] = acc[first + i][n8];
                    partial[((warp * kTilesAtOnce + i) * 2 + n8) * kWarp + lane.index] =
                        make_float4(c[0], c[1], c[2], c[3]);
                }
            }
            __syncthreads();
            // Warp w adds up half a tile: n16 tile first + w/2, n8 tile w%2.
            const int tile = first + warp / 2;
            if (tile < tiles) {
                float4 sum = partial[warp * kWarp + lane.index];
                for (int w = 1; w < kWarps; ++w) {
                    const float4 c = partial[(w * kTilesAtOnce * 2 + warp) * kWarp + lane.index];
                    sum.x = __fadd_rn(sum.x, c.x);
                    sum.y = __fadd_rn(sum.y, c.y);
                    sum.z = __fadd_rn(sum.z, c.z);
                    sum.w = __fadd_rn(sum.w, c.w);
                }
                const int column = (first_tile + tile) * kRowTile + warp % 2 * 8 + lane.t * 2;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (transform.row[i] >= p.rows) continue;
                    *reinterpret_cast<float2*>(p.lora_act + transform.row[i] * p.rank + column) =
                        i == 0 ? make_float2(sum.x, sum.y) : make_float2(sum.z, sum.w);
                }
            }
        }
    }
}

template <class T, class Codes, int kTiles>
Status launch_tiles(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    const Factors factors{static_cast<float>(p.clip / Codes::kSteps), static_cast<float>(p.clip / 7)};
    const auto blocks = static_cast<unsigned>(ceil_div(p.rows, kRowTile));
    const unsigned passes = kTiles == 0 ? 1 : static_cast<unsigned>(ceil_div(p.rank / kRowTile, kTiles));
    return launch_kernel(quantize_lora_down_kernel<T, Codes, kTiles>, dim3(blocks, passes), kThreads, 0, stream, p,
                         factors);
}

// The smallest compiled width that holds the rank, else several passes.
template <class T, class Codes>
Status launch_rank(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    const int tiles = p.rank / kRowTile;
    if (tiles == 0) return launch_tiles<T, Codes, 0>(p, stream);
    if (tiles == 1) return launch_tiles<T, Codes, 1>(p, stream);
    if (tiles == 2) return launch_tiles<T, Codes, 2>(p, stream);
    return launch_tiles<T, Codes, 8>(p, stream);
}

template <class Codes>
Status launch_dtype(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_rank<__half, Codes>(p, stream)
                                      : launch_rank<__nv_bfloat16, Codes>(p, stream);
}

// The kernels of one kind of codes, for compiled_kernels().
template <class Codes>
struct Kernels {
    template <class T>
    struct OfDtype {
        template <int tiles>
        static Registration entry() {
            return registered<quantize_lora_down_kernel<T, Codes, tiles>>(kThreads, 0);
        }
        Registration rank0 = entry<0>(), rank16 = entry<1>(), rank32 = entry<2>(), rank128 = entry<8>();
    };
    OfDtype<__half> half;
    OfDtype<__nv_bfloat16> bfloat16;
};

}  // namespace omniw4::quantize
