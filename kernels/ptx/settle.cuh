#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Makes of a value one that the compiler knows nothing about: it works nothing out from it ahead of time.
__device__ __forceinline__ void settle(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

}  // namespace omniw4::ptx
