// gemm_lora_up, family mma_s4: tokens are operand A and weights operand B of mma.m16n8k64, one k64 step a group.
//
// Both operands lie in memory in fragment order, so a tile is copied by cp.async as it is and read back with one
// 16-byte load a lane, without bank conflicts. A stage of the pipeline holds two groups, and a step of the main loop
// has one barrier.
//
// Dequantization: the integer products start from the bit pattern of 1.5 * 2^23, so that the sum, read as a float, is
// that number plus the sum (|sum| <= 4096): a subtraction replaces the conversion. acc += sum * (a_scale * w_scale), the
// product of two FP16 scales being exact in FP32: one rounding a group, in the order of K, whatever the tile.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/launch.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma_f16.cuh"
#include "../ptx/mma_s4.cuh"
#include "low_rank_sm80.cuh"
#include "tile_s4_sm80.h"

namespace omniw4::gemm::s4 {

constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kMagic = 12582912.0f;

// Shared memory of one pipeline stage, in bytes.
template <class Tile>
struct Stage {
    static constexpr int kA = 0;                                             // [rows/16][groups][32 lanes][16]
    static constexpr int kB = kA + Tile::kRows * kGroup / 2 * kStageGroups;  // [groups][columns/16][32 lanes][16]
    static constexpr int kAScales = kB + Tile::kColumns * kGroup / 2 * kStageGroups;  // [groups][rows] FP16
    static constexpr int kWScales = kAScales + Tile::kRows * 2 * kStageGroups;        // [groups][columns] FP16
    static constexpr int kBytes = kWScales + Tile::kColumns * 2 * kStageGroups;
    static_assert(kBytes % 16 == 0);
};

// One block's tile of the output and the memory it reads.
template <class Tile>
struct Block {
    const GemmLoraUpParams& p;
    int groups;
    int64_t row_tiles, first_row_tile;
    int first_column;

    __device__ __forceinline__ explicit Block(const GemmLoraUpParams& params)
        : p(params),
          groups(params.in_features / kGroup),
          row_tiles(ceil_div(params.rows, kRowTile)),
          first_row_tile(static_cast<int64_t>(blockIdx.x) * (Tile::kRows / kRowTile)),
          first_column(blockIdx.y * Tile::kColumns) {}

    // Starts the copies of groups step * kStageGroups onwards; what lies past M or K becomes zero.
    __device__ __forceinline__ void fetch(uint32_t stage, int step) const {
        using S = Stage<Tile>;
        const int group = step * kStageGroups;
        constexpr int kLanesA = Tile::kRows / kRowTile * kStageGroups * kWarp;
        for (int i = threadIdx.x; i < kLanesA; i += Tile::kThreads) {
            const int within = i % (kStageGroups * kWarp);
            const int64_t tile = first_row_tile + i / (kStageGroups * kWarp);
            const bool valid = tile < row_tiles && group + within / kWarp < groups;
            const int64_t index = valid ? (tile * groups + group) * kWarp + within : 0;
            ptx::cp_async_16(stage + S::kA + i * 16, static_cast<const uint4*>(p.qact) + index, valid);
        }
        const int64_t block = first_column / kColumnBlock;
        const int first_n16 = first_column % kColumnBlock / 16;
        constexpr int kLanesB = Tile::kColumns / 16 * kWarp;
        for (int i = threadIdx.x; i < kLanesB * kStageGroups; i += Tile::kThreads) {
            const int g = group + i / kLanesB;
            const bool valid = g < groups;
            const int64_t index = valid ? ((block * groups + g) * 8 + first_n16) * kWarp + i % kLanesB : 0;
            ptx::cp_async_16(stage + S::kB + i * 16, static_cast<const uint4*>(p.qweight) + index, valid);
        }
        constexpr int kChunksA = Tile::kRows / 8, kChunksW = Tile::kColumns / 8;
        for (int i = threadIdx.x; i < (kChunksA + kChunksW) * kStageGroups; i += Tile::kThreads) {
            if (i < kChunksA * kStageGroups) {
                const int g = group + i / kChunksA;
                const int64_t row = first_row_tile * kRowTile + i % kChunksA * 8, padded = row_tiles * kRowTile;
                const bool valid = g < groups && row < padded;
                const __half* source = static_cast<const __half*>(p.a_scales) + (valid ? g * padded + row : 0);
                ptx::cp_async_16(stage + S::kAScales + i * 16, source, valid);
            } else {
                const int j = i - kChunksA * kStageGroups, g = group + j / kChunksW;
                const bool valid = g < groups;
                const int64_t offset =
                    (block * groups + g) * kColumnBlock + first_column % kColumnBlock + j % kChunksW * 8;
                const __half* source = static_cast<const __half*>(p.w_scales) + (valid ? offset : 0);
                ptx::cp_async_16(stage + S::kWScales + j * 16, source, valid);
            }
        }
    }
};

// A warp's share of the tile, as C fragments of m16n8 products.
template <class Tile>
using Accumulators = float[Tile::kWarpM16][Tile::kWarpN8][4];

template <class Tile>
struct Warp {
    Lane lane;
    int m16, n16;  // first m16 and n16 tile of this warp within the block's tile

    __device__ __forceinline__ Warp() {
        const int warp = threadIdx.x / kWarp;
        m16 = warp / Tile::kWarpsN * Tile::kWarpM16;
        n16 = warp % Tile::kWarpsN * (Tile::kWarpN8 / 2);
    }

    // acc += one group of a stage.
    __device__ __forceinline__ void multiply(const uint8_t* stage, int group, Accumulators<Tile>& acc) const {
        using S = Stage<Tile>;
        constexpr int kN16 = Tile::kColumns / 16;
        const uint4* a_tiles = reinterpret_cast<const uint4*>(stage + S::kA);
        const uint4* b_tiles = reinterpret_cast<const uint4*>(stage + S::kB);
        const __half* a_scales = reinterpret_cast<const __half*>(stage + S::kAScales) + group * Tile::kRows;
        const __half* w_scales = reinterpret_cast<const __half*>(stage + S::kWScales) + group * Tile::kColumns;

        uint32_t b[Tile::kWarpN8][2];
        float2 w_scale[Tile::kWarpN8];
#pragma unroll
        for (int n = 0; n < Tile::kWarpN8; n += 2) {
            const uint4 word = b_tiles[(group * kN16 + n16 + n / 2) * kWarp + lane.index];
            b[n][0] = word.x;
            b[n][1] = word.y;
            b[n + 1][0] = word.z;
            b[n + 1][1] = word.w;
        }
#pragma unroll
        for (int n = 0; n < Tile::kWarpN8; ++n) {
            const int column = n16 * 16 + n * 8 + lane.t * 2;
            w_scale[n] = __half22float2(*reinterpret_cast<const __half2*>(w_scales + column));
        }
#pragma unroll
        for (int m = 0; m < Tile::kWarpM16; ++m) {
            const uint4 word = a_tiles[((m16 + m) * kStageGroups + group) * kWarp + lane.index];
            const uint32_t a[4] = {word.x, word.y, word.z, word.w};
            const float low = __half2float(a_scales[(m16 + m) * kRowTile + lane.g]);
            const float high = __half2float(a_scales[(m16 + m) * kRowTile + lane.g + 8]);
#pragma unroll
            for (int n = 0; n < Tile::kWarpN8; ++n) {
                int32_t sum[4];
                ptx::mma_m16n8k64_s4(sum, a, b[n], kMagicBits);
                float (&c)[4] = acc[m][n];
                c[0] = __fmaf_rn(__fsub_rn(__int_as_float(sum[0]), kMagic), __fmul_rn(low, w_scale[n].x), c[0]);
                c[1] = __fmaf_rn(__fsub_rn(__int_as_float(sum[1]), kMagic), __fmul_rn(low, w_scale[n].y), c[1]);
                c[2] = __fmaf_rn(__fsub_rn(__int_as_float(sum[2]), kMagic), __fmul_rn(high, w_scale[n].x), c[2]);
                c[3] = __fmaf_rn(__fsub_rn(__int_as_float(sum[3]), kMagic), __fmul_rn(high, w_scale[n].y), c[3]);
            }
        }
    }

    // acc += lora_act * proj_up^T, in registers.
    template <class T>
    __device__ __forceinline__ void add_low_rank(const Block<Tile>& block, Accumulators<Tile>& acc) const {
        const GemmLoraUpParams& p = block.p;
        for (int step = 0; step < p.rank / kRowTile; ++step) {
            uint32_t b[Tile::kWarpN8][2];
#pragma unroll
            for (int n = 0; n < Tile::kWarpN8; ++n) {
                const int64_t column = block.first_column + n16 * 16 + n * 8 + lane.g;
                const T* source = static_cast<const T*>(p.proj_up) + column * p.rank + step * kRowTile + lane.t * 2;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const bool valid = column < p.out_features;
                    b[n][i] = valid ? *reinterpret_cast<const uint32_t*>(source + i * 8) : 0;
                }
            }
#pragma unroll
            for (int m = 0; m < Tile::kWarpM16; ++m) {
                uint32_t a[4];
                load_lora_act<T>(p, block.first_row_tile + m16 + m, step, lane, a);
#pragma unroll
                for (int n = 0; n < Tile::kWarpN8; ++n) ptx::mma_m16n8k16<T>(acc[m][n], a, b[n]);
            }
        }
    }

    template <class T>
    __device__ __forceinline__ void add_bias(const Block<Tile>& block, Accumulators<Tile>& acc) const {
        if (block.p.bias == nullptr) return;
#pragma unroll
        for (int n = 0; n < Tile::kWarpN8; ++n) {
            const int column = block.first_column + n16 * 16 + n * 8 + lane.t * 2;
            if (column >= block.p.out_features) continue;  // N is even, so both columns of the pair are inside
            const T* bias = static_cast<const T*>(block.p.bias) + column;
            const float2 pair = Scalar<T>::unpack(*reinterpret_cast<const uint32_t*>(bias));
#pragma unroll
            for (int m = 0; m < Tile::kWarpM16; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][n][i] = __fadd_rn(acc[m][n][i], i % 2 == 0 ? pair.x : pair.y);
            }
        }
    }
};

// The block's tile passes through shared memory in slices, one m16 tile of every warp at a time.
template <class T, class Tile, class Policy>
__device__ __forceinline__ void store(const Block<Tile>& block, const Warp<Tile>& warp, const Accumulators<Tile>& acc,
                                      float* shared) {
    constexpr int kPitch = Tile::kSlicePitch, kSliceRows = Tile::kWarpsM * kRowTile, kChunks = Tile::kColumns / 8;
    static_assert(kSliceRows * kChunks % Tile::kThreads == 0 || kSliceRows * kChunks < Tile::kThreads);
    const int warp_m = warp.m16 / Tile::kWarpM16;
#pragma unroll
    for (int m = 0; m < Tile::kWarpM16; ++m) {
        float* slice = shared + m % 2 * (kSliceRows * kPitch);
#pragma unroll
        for (int n = 0; n < Tile::kWarpN8; ++n) {
            float* to = slice + (warp_m * kRowTile + warp.lane.g) * kPitch + warp.n16 * 16 + n * 8 + warp.lane.t * 2;
            *reinterpret_cast<float2*>(to) = make_float2(acc[m][n][0], acc[m][n][1]);
            *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(acc[m][n][2], acc[m][n][3]);
        }
        __syncthreads();  // the slice before this one is free as well: every thread has read it before it came here
        for (int i = threadIdx.x; i < kSliceRows * kChunks; i += Tile::kThreads) {
            const int r = i / kChunks, c = i % kChunks * 8;
            const int64_t tile = block.first_row_tile + r / kRowTile * Tile::kWarpM16 + m;
            const int64_t row = tile * kRowTile + r % kRowTile;
            const int column = block.first_column + c;
            float v[8];
            *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(slice + r * kPitch + c);
            *reinterpret_cast<float4*>(v + 4) = *reinterpret_cast<const float4*>(slice + r * kPitch + c + 4);
            Policy::template apply<T>(block.p, row, column, row < block.p.rows && column < block.p.out_features, v);
        }
    }
}

template <class T, class Tile, class Policy>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    gemm_lora_up_kernel(const __grid_constant__ GemmLoraUpParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int kStageBytes = Stage<Tile>::kBytes;
    const Block<Tile> block(p);
    const Warp<Tile> warp;
    const uint32_t base = ptx::shared_address(shared);
    const int steps = static_cast<int>(ceil_div(block.groups, kStageGroups));

    Accumulators<Tile> acc = {};
#pragma unroll 1
    for (int step = 0; step < Tile::kStages - 1; ++step) {
        if (step < steps) block.fetch(base + step * kStageBytes, step);
        ptx::cp_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<Tile::kStages - 2>();
        __syncthreads();  // this step's data is there for all, and the stage of the step before is free
        const int ahead = step + Tile::kStages - 1;
        if (ahead < steps) block.fetch(base + ahead % Tile::kStages * kStageBytes, ahead);
        ptx::cp_async_commit();
        const uint8_t* stage = shared + step % Tile::kStages * kStageBytes;
#pragma unroll
        for (int group = 0; group < kStageGroups; ++group) {
            if (step * kStageGroups + group < block.groups) warp.multiply(stage, group, acc);
        }
    }
    warp.template add_low_rank<T>(block, acc);
    warp.template add_bias<T>(block, acc);
    ptx::cp_async_wait<0>();
    __syncthreads();  // all are done with the stages, which become the slices
    store<T, Tile, Policy>(block, warp, acc, reinterpret_cast<float*>(shared));
}

template <class Tile>
constexpr int shared_bytes() {
    constexpr int pipeline = Tile::kStages * Stage<Tile>::kBytes;
    constexpr int slices = 2 * Tile::kWarpsM * kRowTile * Tile::kSlicePitch * 4;
    return pipeline > slices ? pipeline : slices;
}

template <class T, class Tile, class Policy>
Status launch_tile(const GemmLoraUpParams& p, cudaStream_t stream) {
    constexpr auto kernel = gemm_lora_up_kernel<T, Tile, Policy>;
    constexpr int bytes = shared_bytes<Tile>();
    if (const Status status = allow_shared_memory<kernel>(bytes); status != Status::kOk) return status;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, Tile::kRows)),
                    static_cast<unsigned>(ceil_div(p.out_features, Tile::kColumns)));
    kernel<<<grid, Tile::kThreads, bytes, stream>>>(p);
    return launch_status();
}

template <class Policy, class SmallTile>
Status launch_policy(const GemmLoraUpParams& p, cudaStream_t stream) {
    const bool large = p.tile == 0 ? prefers_large_tile(p.rows, p.out_features) : p.tile == LargeTile::kRows;
    if (p.dtype == DType::kFloat16) {
        return large ? launch_tile<__half, LargeTile, Policy>(p, stream)
                     : launch_tile<__half, SmallTile, Policy>(p, stream);
    }
    return large ? launch_tile<__nv_bfloat16, LargeTile, Policy>(p, stream)
                 : launch_tile<__nv_bfloat16, SmallTile, Policy>(p, stream);
}

// The four kernels of one epilogue, for compiled_kernels().
template <class Policy, class SmallTile>
struct Kernels {
    template <class T, class Tile>
    static Registration entry() {
        return registered<gemm_lora_up_kernel<T, Tile, Policy>>(Tile::kThreads, shared_bytes<Tile>());
    }
    Registration half_large = entry<__half, LargeTile>(), half_small = entry<__half, SmallTile>();
    Registration bfloat16_large = entry<__nv_bfloat16, LargeTile>(), bfloat16_small = entry<__nv_bfloat16, SmallTile>();
};

}  // namespace omniw4::gemm::s4
