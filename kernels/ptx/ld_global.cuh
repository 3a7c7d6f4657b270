#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Sixteen bytes that this multiprocessor reads once: they take no place in L1.
__device__ __forceinline__ uint4 ld_global_once(const void* source) {
    uint4 d;
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                 : "l"(source));
    return d;
}

}  // namespace omniw4::ptx
