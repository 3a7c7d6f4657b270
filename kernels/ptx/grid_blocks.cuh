#pragma once

#include <cstdint>

namespace omniw4::ptx {

// gridDim.x, read here and not, as the compiler would, once and for all.
__device__ __forceinline__ uint32_t grid_blocks() {
    uint32_t count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
}

}  // namespace omniw4::ptx
