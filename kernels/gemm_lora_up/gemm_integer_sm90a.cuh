// gemm_lora_up, family wgmma_s8, integer group scales: Y^T = W X^T, with the weights as operand A of wgmma, in registers,
// and the tokens as operand B, in shared memory. Activations are bytes, whichever way they were quantized: s * q of 4
// bits, or codes of 8.
//
// One thread copies (integer_producer_sm90a.cuh), up to three warpgroups multiply (integer_consumer_sm90a.cuh); blocks
// stay and take tile after tile, so that copies for the next run while this one is stored.
//
// docs/mma-layouts.md draws the operands; docs/hopper.md says what was measured on the way here.
#pragma once

#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "integer_consumer_sm90a.cuh"
#include "integer_producer_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    gemm_lora_up_kernel(const __grid_constant__ GemmLoraUpParams p) {
    using Plan = integer::Plan<Tile>;
    using Consumer = integer::Consumer<T, Tile>;
    ptx::pdl_launch_dependents();  // who comes next waits for the end of this kernel before it touches anything
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
    if (threadIdx.x >= Tile::kWarpgroups * 128) {
        ptx::setmaxnreg_decrease<Tile::kProducerRegisters>();
        if (threadIdx.x < Tile::kWarpgroups * 128 + kWarp) {
            Producer<Tile> producer{p, {p}, {base}};
            producer.prefetch(threadIdx.x % kWarp);
            if (threadIdx.x % kWarp == 0) producer.run();
        }
    } else {
        ptx::setmaxnreg_increase<Tile::kConsumerRegisters>();
        ptx::pdl_wait();
        const int row_group = Consumer::row_group();
        const uint32_t tail = base + Plan::kStages * Plan::kStageBytes;
        const uint32_t slices = tail + row_group * 2 * Plan::kSliceBytes;
        Consumer consumer{p, {p}, {base}, {p, 1 + row_group, slices}, tail + Plan::kSums};
        consumer.run();
    }
}

template <class T, class Tile>
Status launch_tile(const GemmLoraUpParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr auto kernel = gemm_lora_up_kernel<T, Tile>;
    constexpr int bytes = Plan<Tile>::kBytes;
    if (const Status status = allow_shared_memory<kernel>(bytes); status != Status::kOk) return status;
    const int64_t features = round_up(p.out_features, kColumnBlock);
    const int64_t tiles = ceil_div(p.rows, Tile::kTokens) * ceil_div(features, Tile::kFeatures);
    if (tiles > INT32_MAX) return Status::kBadShape;  // blocks count them in an int
    const int64_t slots = static_cast<int64_t>(multiprocessors) * Tile::kBlocks;
    const dim3 grid(static_cast<unsigned>(tiles < slots ? tiles : slots));
    return launch_early(kernel, grid, Tile::kThreads, bytes, stream, p);
}

template <class T, class Tile>
Registration entry() {
    return registered<gemm_lora_up_kernel<T, Tile>>(Tile::kThreads, Plan<Tile>::kBytes);
}

}  // namespace omniw4::gemm::sm90a::integer
