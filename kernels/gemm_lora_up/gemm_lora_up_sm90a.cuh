// gemm_lora_up, family wgmma_s8: Y^T = W X^T, with the weights as operand A of wgmma, in registers, and the tokens as
// operand B, in shared memory.
//
// Nibbles widen to bytes on their way from shared memory to registers and are stored nowhere else. One thread copies
// (producer_sm90a.cuh), one or two warpgroups multiply and scale (consumer_sm90a.cuh); blocks stay and take tile after
// tile, so that copies for the next run while this one is stored. Sums over K go group by group in the order of K,
// whatever the tile: a row's bits depend on nothing else.
//
// docs/mma-layouts.md draws the operands; docs/hopper.md says what was measured on the way here.
#pragma once

#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "consumer_sm90a.cuh"
#include "producer_sm90a.cuh"

namespace omniw4::gemm::sm90a {

// Registers a thread once the producer has given up what it does not need. A block has what it was launched with, the
// launch bounds' share rounded down to a multiple of 8, and no more: a warpgroup that asks for more waits for ever.
template <class Tile>
struct Registers {
    static constexpr int kLaunched = 65536 / (Tile::kBlocks * Tile::kThreads) / 8 * 8;
    static constexpr int kProducer = Tile::kWarpgroups == 1 ? 40 : 24;
    static constexpr int kConsumer = Tile::kWarpgroups == 1 ? 216 : 240;
    static_assert(kProducer + Tile::kWarpgroups * kConsumer <= (Tile::kWarpgroups + 1) * kLaunched);
};

template <class T, int act_bits, class Tile, class Policy>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    gemm_lora_up_kernel(const __grid_constant__ GemmLoraUpParams p) {
    using Plan = sm90a::Plan<act_bits, Tile>;
    extern __shared__ uint8_t raw[];
    const uint32_t base = (ptx::shared_address(raw) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < Plan::kStages; ++i) {
            ptx::mbarrier_init(base + i * Plan::kStageBytes + Plan::kFull, 1);
            ptx::mbarrier_init(base + i * Plan::kStageBytes + Plan::kEmpty, Tile::kWarpgroups * 4);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::pdl_launch_dependents();
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_decrease<Registers<Tile>::kProducer>();
        if (threadIdx.x < kWarp) {
            Producer<act_bits, Tile> producer{p, {p}, {base}};
            producer.prefetch(threadIdx.x);
            if (threadIdx.x == 0) {
                ptx::pdl_wait();
                producer.run();
            }
        }
    } else {
        ptx::setmaxnreg_increase<Registers<Tile>::kConsumer>();
        ptx::pdl_wait();
        using Consumer = sm90a::Consumer<T, act_bits, Tile>;
        const uint32_t slices = base + Plan::kStages * Plan::kStageBytes;
        Consumer consumer{p, {p}, {base}, slices + Consumer::warpgroup() * 2 * Plan::kSliceBytes};
        consumer.template run<Policy>();
    }
}

template <class T, int act_bits, class Tile, class Policy>
Status launch_tile(const GemmLoraUpParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr auto kernel = gemm_lora_up_kernel<T, act_bits, Tile, Policy>;
    constexpr int bytes = Plan<act_bits, Tile>::kBytes;
    if (const Status status = allow_shared_memory<kernel>(bytes); status != Status::kOk) return status;
    const int64_t tiles = ceil_div(p.rows, Tile::kTokens) * (round_up(p.out_features, kColumnBlock) / Tile::kFeatures);
    if (tiles > INT32_MAX) return Status::kBadShape;  // blocks count them in an int
    const int64_t slots = static_cast<int64_t>(multiprocessors) * Tile::kBlocks;
    const dim3 grid(static_cast<unsigned>(tiles < slots ? tiles : slots));
    return launch_early(kernel, grid, Tile::kThreads, bytes, stream, p);
}

template <class T, int act_bits, class Policy>
Status launch_act(const GemmLoraUpParams& p, cudaStream_t stream) {
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        return Status::kLaunchFailed;
    }
    const int64_t features = round_up(p.out_features, kColumnBlock);
    const auto asked = static_cast<TileChoice>(p.tile);
    switch (asked == TileChoice::kAuto ? choose_tile(p.rows, features, multiprocessors) : asked) {
        case TileChoice::kAuto: break;
        case TileChoice::k64x16: return launch_tile<T, act_bits, Tile64x16, Policy>(p, multiprocessors, stream);
        case TileChoice::k64x32: return launch_tile<T, act_bits, Tile64x32, Policy>(p, multiprocessors, stream);
        case TileChoice::k128x64: return launch_tile<T, act_bits, Tile128x64, Policy>(p, multiprocessors, stream);
        case TileChoice::k256x64:
            if (features % Tile256x64::kFeatures != 0) break;
            return launch_tile<T, act_bits, Tile256x64, Policy>(p, multiprocessors, stream);
        case TileChoice::k128x128: return launch_tile<T, act_bits, Tile128x128, Policy>(p, multiprocessors, stream);
    }
    return Status::kUnsupported;
}

template <int act_bits, class Policy>
Status launch_dtype(const GemmLoraUpParams& p, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_act<__half, act_bits, Policy>(p, stream)
                                      : launch_act<__nv_bfloat16, act_bits, Policy>(p, stream);
}

// The kernels of one width and epilogue, for compiled_kernels().
template <int act_bits, class Policy>
struct Kernels {
    template <class T, class Tile>
    static Registration entry() {
        return registered<gemm_lora_up_kernel<T, act_bits, Tile, Policy>>(Tile::kThreads, Plan<act_bits, Tile>::kBytes);
    }
    template <class T>
    struct OfType {
        Registration tiles[5] = {entry<T, Tile64x16>(), entry<T, Tile64x32>(), entry<T, Tile128x64>(),
                                 entry<T, Tile256x64>(), entry<T, Tile128x128>()};
    };
    OfType<__half> half;
    OfType<__nv_bfloat16> bfloat16;
};

}  // namespace omniw4::gemm::sm90a
