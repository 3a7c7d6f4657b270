#pragma once

namespace omniw4::ptx {

// Barrier number `barrier` among `threads` threads of a block; number 0 is __syncthreads().
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts this thread in at such a barrier without waiting there.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace omniw4::ptx
