#pragma once

#include <cstdint>

namespace omniw4::ptx {

// d[16, 8] = a[16, 64] * b[64, 8] + c, signed nibbles into int32, every element of c being the same number.
// One native instruction on sm_80, sm_86 and sm_89; emulated by the compiler with two INT8 products on sm_90.
__device__ __forceinline__ void mma_m16n8k64_s4(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                int32_t c) {
    asm("mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c));
}

}  // namespace omniw4::ptx
