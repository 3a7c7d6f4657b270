// Which element of a tile a lane holds, for every mma.sync of this project.
//
// The instructions m16n8k64 (nibbles) and m16n8k16 (16-bit floats) share one picture, since a row of k is eight 32-bit
// words in both. With g = lane / 4 and t = lane % 4:
//
//     A [16, k]   register 0: row g,     word t        B [k, 8]   register 0: column g, word t
//                 register 1: row g + 8, word t                   register 1: column g, word t + 4
//                 register 2: row g,     word t + 4
//                 register 3: row g + 8, word t + 4    C [16, 8]  registers 0, 1: row g,     columns 2t, 2t + 1
//                                                                 registers 2, 3: row g + 8, columns 2t, 2t + 1
//
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k64" and "... for mma.m16n8k16 with floating point type".
#pragma once

#include <cstdint>

namespace omniw4 {

constexpr int kWarp = 32;

struct Lane {
    int index, g, t;
    __device__ __forceinline__ Lane() : index(threadIdx.x % kWarp), g(index / 4), t(index % 4) {}
};

__host__ __device__ constexpr int64_t ceil_div(int64_t n, int64_t d) {
    return (n + d - 1) / d;
}
__host__ __device__ constexpr int64_t round_up(int64_t n, int64_t multiple) {
    return ceil_div(n, multiple) * multiple;
}

}  // namespace omniw4
