#pragma once

namespace omniw4::ptx {

// This thread's ordinary stores to shared memory before, what the tensor cores and the copy engine read after: needed
// in each thread that stored, before the barrier that tells the others.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace omniw4::ptx
