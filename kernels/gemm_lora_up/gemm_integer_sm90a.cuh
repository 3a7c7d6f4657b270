// gemm_lora_up, family wgmma_s8, integer group scales: Y^T = W X^T, with the weights as operand A of wgmma, in registers,
// and the tokens as operand B, in shared memory. Activations are bytes, whichever way they were quantized: s * q of 4
// bits, or codes of 8.
//
// Two to four threads copy (integer_producer_sm90a.cuh), up to four warpgroups multiply (integer_consumer_sm90a.cuh) and
// store (integer_output_sm90a.cuh); blocks stay and take tile after tile, so that copies for the next run while this one
// is stored. Or the blocks of a cluster share out the K of one tile, where there are too few of them to go round.
//
// docs/mma-layouts.md draws the operands; docs/hopper.md says what was measured on the way here.
#pragma once

#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/elect.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "integer_consumer_sm90a.cuh"
#include "integer_producer_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    gemm_lora_up_kernel(const __grid_constant__ GemmLoraUpParams p) {
    using Plan = integer::Plan<Tile>;
    ptx::pdl_launch_dependents();  // who comes next waits for the end of this kernel before it touches anything
    extern __shared__ uint8_t raw[];
    const uint32_t base = (ptx::shared_address(raw) + 1023) / 1024 * 1024;
    const Ring<Plan> ring{base};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < Plan::kStages; ++i) {
            ptx::mbarrier_init(ring.full(i), Tile::kProducers);
            ptx::mbarrier_init(ring.empty(i), Tile::kWarpgroups * 4);
        }
        if constexpr (Tile::kClusters) {
#pragma unroll
            for (int i = 0; i < Tile::kWarpgroups; ++i) ptx::mbarrier_init(ring.part_barrier(i), 1);
        }
        ptx::mbarrier_init_fence();
        if constexpr (Tile::kClusters) {
            const Problem<Tile> problem{p};
#pragma unroll
            for (int i = 0; i < Tile::kWarpgroups; ++i) {  // those that finish tokens get sums from other blocks
                const bool receives = problem.finishes() && i % Tile::kSplits < Plan::kReceivers;
                ptx::mbarrier_arrive_expect(ring.part_barrier(i), receives ? Plan::kPartBytes : 0);
            }
        }
    }
    __syncthreads();
    if constexpr (Tile::kClusters) ptx::cluster_arrive_relaxed();
    if (threadIdx.x >= Tile::kWarpgroups * 128) {
        ptx::setmaxnreg_decrease<Tile::kProducerRegisters>();
        const int warp = threadIdx.x / kWarp - Tile::kWarpgroups * 4, lane = threadIdx.x % kWarp;
        Producer<Tile> producer{p, {p}, ring};
        if (warp == 0) {
            if (ptx::elect_one()) producer.run_tokens();
        } else if (warp < Tile::kProducers) {
            // Where no warp is left for it, and the copies have to wait anyway
            if (Tile::kProducers == 4 && !p.weights_ready) producer.prefetch(warp - 1, Tile::kWeightWarps, lane);
            __syncwarp();
            if (ptx::elect_one()) producer.run_weights(warp - 1);
        } else if (warp == Tile::kProducers) {
            producer.prefetch(0, 1, lane);
        }
        if constexpr (Tile::kClusters) {
            __syncwarp();
            ptx::cluster_wait();  // who has arrived there waits there
        }
    } else {
        ptx::setmaxnreg_increase<Tile::kConsumerRegisters>();
        ptx::pdl_wait();
        Consumer<T, Tile> consumer{p, {p}, ring};
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
    const int64_t blocks = Tile::kClusters ? tiles * Tile::kCluster : tiles < slots ? tiles : slots;
    if (blocks > INT32_MAX) return Status::kBadShape;
    return launch_early_clusters(kernel, dim3(static_cast<unsigned>(blocks)), Tile::kCluster, Tile::kThreads, bytes,
                                 stream, p);
}

// Tile number `index` of a list.
template <class T, class... Tiles>
Status launch_one_of(TileList<Tiles...>, int index, const GemmLoraUpParams& p, int multiprocessors,
                     cudaStream_t stream) {
    Status status = Status::kUnsupported;
    int i = 0;
    ((i++ == index ? static_cast<void>(status = launch_tile<T, Tiles>(p, multiprocessors, stream)) : void()), ...);
    return status;
}

template <class T, class List>
struct Entries;
template <class T, class... Tiles>
struct Entries<T, TileList<Tiles...>> {
    Registration kernels[sizeof...(Tiles)] = {
        registered<gemm_lora_up_kernel<T, Tiles>>(Tiles::kThreads, Plan<Tiles>::kBytes)...};
};

}  // namespace omniw4::gemm::sm90a::integer
