#pragma once

#include <cstdint>

namespace omniw4::ptx {

// True in one lane of a warp, all of whose lanes are here. The compiler knows then that what follows is one thread's.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.b32 %0, 1, 0, p;\n}\n"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace omniw4::ptx
