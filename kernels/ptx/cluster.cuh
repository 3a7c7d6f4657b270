// Blocks of a cluster: their barrier, and stores into each other's shared memory. An address of another block's shared
// memory comes from map_shared; a store to one's own goes the same way.
#pragma once

#include <cstdint>

namespace omniw4::ptx {

// This block's number in its cluster, the cluster's in the grid, and the number of clusters; all along x. By the
// compiler's functions, so that it knows that they are the same for all threads.
__device__ __forceinline__ int cluster_rank() {
    return static_cast<int>(__clusterRelativeBlockRank());
}

__device__ __forceinline__ int cluster_index() {
    return static_cast<int>(__clusterIdx().x);
}

__device__ __forceinline__ int cluster_count() {
    return static_cast<int>(__clusterGridDimInClusters().x);
}

// Counts this thread in; orders nothing but what fences before it do (mbarrier_init_fence).
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// Waits until all threads of the cluster have arrived. Drops what L1 holds.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait;" ::: "memory");
}

// The address, in the shared memory of block `rank` of the cluster, of what lies at `address` in this one's.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, int rank) {
    uint32_t d;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(address), "r"(rank));
    return d;
}

// Sixteen bytes to a block of the cluster, in launches with clusters alone; the barrier, of that same block, receives
// sixteen bytes when they are there.
__device__ __forceinline__ void st_async_v4(uint32_t address, const float4& value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void st_async_v4(uint32_t address, const uint4& value, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
        : "memory");
}

// The larger of an unsigned word of this block's shared memory and `value`, atomically, into the word.
__device__ __forceinline__ void red_shared_max_u32(uint32_t address, uint32_t value) {
    asm volatile("red.relaxed.cta.shared.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace omniw4::ptx
