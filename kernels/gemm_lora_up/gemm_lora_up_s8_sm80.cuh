// gemm_lora_up, family mma_s8: Y^T = W * X^T by mma.m16n8k32 on bytes, the INT4 weights widened in registers; for every
// GPU from sm_80 on.
//
// A stage of the pipeline holds two groups, and a step of the main loop has one barrier. With integer group scales one
// INT32 sum runs over all of K. With FP16 scales each group's sum is added with one rounding, in the order of K. Neither
// depends on the tile.
#pragma once

#include "../common/epilogue.cuh"
#include "../common/launch.h"
#include "warp_s8_sm80.cuh"

namespace omniw4::gemm::s8 {

// Rows leave in whole 16-byte words: eight neighbouring features a thread.
template <class Policy, class T, class Tile, class Scales>
__device__ __forceinline__ void store(const Block<Tile, Scales>& block, const float* tile) {
    constexpr int kChunks = Tile::kFeatures / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < Tile::kTokens * kChunks; i += Tile::kThreads) {
        const int token = i / kChunks, chunk = i % kChunks * 8;
        const int64_t row = block.first_token + token;
        const int column = block.first_feature + chunk;
        const float4* from = reinterpret_cast<const float4*>(tile + token * Tile::kPitch + chunk);
        float v[8];
        *reinterpret_cast<float4*>(v) = from[0];
        *reinterpret_cast<float4*>(v + 4) = from[1];
        Policy::template apply<T>(block.p, row, column, row < block.p.rows && column < block.p.out_features, v);
    }
}

template <class T, class Tile, class Scales>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    gemm_lora_up_s8_kernel(const __grid_constant__ GemmLoraUpParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    using W = Warp<T, Tile, Scales>;
    constexpr int kStageBytes = Stage<Tile, Scales>::kBytes;
    const Block<Tile, Scales> block(p);
    const Copies<Tile, Scales> copies(block);
    const W warp;
    const uint32_t base = ptx::shared_address(shared);
    const int steps = static_cast<int>(ceil_div(block.groups, kStageGroups));

    typename W::template Fragments<typename W::Sum> sums = {};
#pragma unroll 1
    for (int step = 0; step < Tile::kStages - 1; ++step) {
        if (step < steps) copies.start(base + step * kStageBytes, step);
        ptx::cp_async_commit();
    }
    int current = 0, next = Tile::kStages - 1;  // stages: of this step's data, and of the data to come
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<Tile::kStages - 2>();
        __syncthreads();  // this step's data is there for all, and the stage of the step before is free
        const int ahead = step + Tile::kStages - 1;
        if (ahead < steps) copies.start(base + next * kStageBytes, ahead);
        ptx::cp_async_commit();
        const uint8_t* stage = shared + current * kStageBytes;
#pragma unroll
        for (int group = 0; group < kStageGroups; ++group) {
            if (step * kStageGroups + group < block.groups) {
                warp.multiply(stage, base + current * kStageBytes, group, sums);
            }
        }
        next = current;
        current = current + 1 == Tile::kStages ? 0 : current + 1;
    }
    typename W::template Fragments<float> acc;
    warp.finish(block, sums, acc);
    warp.add_low_rank(block, acc);
    warp.add_bias(block, acc);
    ptx::cp_async_wait<0>();
    __syncthreads();  // all are done with the stages, which become the tile
    float* tile = reinterpret_cast<float*>(shared);
    warp.put(tile, acc);
    __syncthreads();
    switch (p.epilogue) {
        case Epilogue::kPlain: store<epilogue::Plain, T>(block, tile); break;
        case Epilogue::kResidual: store<epilogue::Residual, T>(block, tile); break;
        case Epilogue::kSwiglu: store<epilogue::Swiglu, T>(block, tile); break;
        case Epilogue::kQkNormRope:
            if constexpr (Tile::kFeatures >= 128) store<epilogue::QkNormRope, T>(block, tile);
            break;
    }
}

template <class Tile, class Scales>
constexpr int shared_bytes() {
    constexpr int pipeline = Tile::kStages * Stage<Tile, Scales>::kBytes, tile = Tile::kTokens * Tile::kPitch * 4;
    return pipeline > tile ? pipeline : tile;
}

template <class T, class Tile, class Scales>
Status launch_tile(const GemmLoraUpParams& p, cudaStream_t stream) {
    constexpr auto kernel = gemm_lora_up_s8_kernel<T, Tile, Scales>;
    constexpr int bytes = shared_bytes<Tile, Scales>();
    if (const Status status = allow_shared_memory<kernel>(bytes); status != Status::kOk) return status;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, Tile::kTokens)),
                    static_cast<unsigned>(ceil_div(p.out_features, Tile::kFeatures)));
    return launch_kernel(kernel, grid, Tile::kThreads, bytes, stream, p);
}

template <class T, class Scales>
Status launch_scales(const GemmLoraUpParams& p, cudaStream_t stream) {
    const bool heads = p.epilogue == Epilogue::kQkNormRope;
    const int tokens = p.tile == 0 ? choose_tile(p.rows, p.out_features, heads) : p.tile;
    if (tokens == LargeTile::kTokens) return launch_tile<T, LargeTile, Scales>(p, stream);
    if (heads) return launch_tile<T, SmallHeadTile, Scales>(p, stream);
    if (tokens == MiddleTile::kTokens) return launch_tile<T, MiddleTile, Scales>(p, stream);
    return launch_tile<T, SmallTile, Scales>(p, stream);
}

template <class T>
Status launch_dtype(const GemmLoraUpParams& p, cudaStream_t stream) {
    if (p.row_scales != nullptr) return launch_scales<T, Integer>(p, stream);
    return p.act_bits == 4 ? launch_scales<T, Groups>(p, stream) : launch_scales<T, Tokens>(p, stream);
}

// The kernels of one dtype, for compiled_kernels().
template <class T>
struct Kernels {
    template <class Scales>
    struct OfScales {
        template <class Tile>
        static Registration entry() {
            return registered<gemm_lora_up_s8_kernel<T, Tile, Scales>>(Tile::kThreads, shared_bytes<Tile, Scales>());
        }
        Registration large = entry<LargeTile>(), middle = entry<MiddleTile>();
        Registration small = entry<SmallTile>(), head = entry<SmallHeadTile>();
    };
    OfScales<Integer> integer;
    OfScales<Groups> groups;
    OfScales<Tokens> tokens;
};

}  // namespace omniw4::gemm::s8
