// attention_varlen for sm_90a: one warp copies (producer_sm90a.cuh), two warpgroups multiply (consumer_sm90a.cuh); a
// block stays and takes work after work, so that copies for the next run while this one is finished.
#pragma once

#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "../common/tensor_map.h"
#include "../ptx/pdl.cuh"
#include "../ptx/setmaxnreg.cuh"
#include "consumer_sm90a.cuh"
#include "producer_sm90a.cuh"
#include "sweep.cuh"

namespace omniw4::attention {

template <class T, int head_dim, int key_tile>
__global__ void __launch_bounds__(kThreads, 1)
    attention_varlen_sm90a_kernel(const __grid_constant__ AttentionVarlenParams p,
                                  const __grid_constant__ CUtensorMap map) {
    using Plan = attention::Plan<head_dim, key_tile>;
    extern __shared__ uint8_t raw[];
    const uint32_t base = (ptx::shared_address(raw) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(base + Plan::kQueriesFull, 1);
        ptx::mbarrier_init(base + Plan::kQueriesEmpty, kConsumerWarps);
        ptx::mbarrier_init(base + Plan::kTailReady, 1);
        ptx::mbarrier_init(base + Plan::kTailReady + 8, 1);
#pragma unroll
        for (int i = 0; i < Plan::kStages * 8; i += 8) {
            ptx::mbarrier_init(base + Plan::kKeysFull + i, 1);
            ptx::mbarrier_init(base + Plan::kKeysEmpty + i, kConsumerWarps);
            ptx::mbarrier_init(base + Plan::kValuesFull + i, 1);
            ptx::mbarrier_init(base + Plan::kValuesEmpty + i, kConsumerWarps);
        }
        ptx::mbarrier_init_fence();
        ptx::prefetch_tensor_map(&map);
    }
    __syncthreads();
    ptx::pdl_launch_dependents();
    if (!p.boundaries_ready) ptx::pdl_wait();
    if (threadIdx.x >= kWarpgroups * 128) {
        ptx::setmaxnreg_decrease<40>();
        if (threadIdx.x < kWarpgroups * 128 + kWarp) {
            Producer<head_dim, key_tile> producer{p, &map, base};
            producer.run();
        } else if (threadIdx.x < kWarpgroups * 128 + 2 * kWarp) {
            sweep(p, p.q_heads * head_dim);
        }
    } else {
        ptx::setmaxnreg_increase<232>();
        Consumer<T, head_dim, key_tile> consumer{p, base,
                                                 __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0)};
        consumer.run();
    }
}

template <class T, int head_dim, int key_tile>
Status launch_tile(const AttentionVarlenParams& p, cudaStream_t stream) {
    constexpr auto kernel = attention_varlen_sm90a_kernel<T, head_dim, key_tile>;
    constexpr int bytes = Plan<head_dim, key_tile>::kBytes;
    if (const Status status = allow_shared_memory<kernel>(bytes); status != Status::kOk) return status;
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        return Status::kLaunchFailed;
    }
    CUtensorMap map;
    const int64_t cols = static_cast<int64_t>(p.q_heads + 2 * p.kv_heads) * head_dim;
    const Status status = make_tensor_map(map, p.qkv, p.rows, cols, p.row_stride, kBoxRows, p.dtype);
    if (status != Status::kOk) return status;
    // At most so much work: a sequence's last unit may hold one row, and its last pair one unit.
    const int group = p.q_heads / p.kv_heads;
    const int64_t units = (p.rows + static_cast<int64_t>(p.sequences) * (kUnitRows - 1)) / kUnitRows * group;
    const int64_t by_rows = (units + p.sequences) / 2, by_length = p.sequences * pairs_of(p.max_seqlen, group);
    const int64_t works = (by_rows < by_length ? by_rows : by_length) * p.kv_heads;
    const int64_t blocks = works < 1 ? 1 : works < multiprocessors ? works : multiprocessors;
    return launch_early(kernel, dim3(static_cast<unsigned>(blocks)), kThreads, bytes, stream, p, map);
}

}  // namespace omniw4::attention
