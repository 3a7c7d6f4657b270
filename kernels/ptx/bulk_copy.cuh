#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Copies a multiple of 16 bytes to shared memory; the barrier receives as many bytes when they are there.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Asks for a multiple of 16 bytes to be brought into L2, which is coherent: it may run ahead of whoever writes them.
__device__ __forceinline__ void bulk_prefetch_l2(const void* source, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

}  // namespace omniw4::ptx
