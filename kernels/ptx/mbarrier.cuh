// Barriers in shared memory that count arrivals and, for bulk copies, bytes. A barrier's phase flips when both counts
// are reached; who waits names the parity of the phase that must be over.
#pragma once

#include <cstdint>

namespace omniw4::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the units that copy.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Counts as `count` arrivals.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, int count) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives and announces bytes that this phase has yet to receive.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

}  // namespace omniw4::ptx
