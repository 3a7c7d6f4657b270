#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Bits 0-3: low, bits 4-7: high, both clamped to [-8, 7]; bits 8-31: the low 24 bits of rest.
__device__ __forceinline__ uint32_t cvt_pack_s4(int32_t high, int32_t low, uint32_t rest) {
    uint32_t d;
    asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(high), "r"(low), "r"(rest));
    return d;
}

// Bits 0-7: low, bits 8-15: high, both clamped to [-128, 127]; bits 16-31: the low 16 bits of rest.
__device__ __forceinline__ uint32_t cvt_pack_s8(int32_t high, int32_t low, uint32_t rest) {
    uint32_t d;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(high), "r"(low), "r"(rest));
    return d;
}

}  // namespace omniw4::ptx
