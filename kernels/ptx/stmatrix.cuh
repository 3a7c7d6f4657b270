#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Four 8x8 matrices of 16-bit elements, transposed: lane 4g+t gives elements (g, 2t) and (g, 2t+1) of each, lanes
// 8i..8i+7 the addresses where columns 0..7 of matrix i go, 16 bytes each.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t column_address, const uint32_t (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column_address),
                 "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
}

}  // namespace omniw4::ptx
