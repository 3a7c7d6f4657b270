#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Four 8x8 matrices of 16-bit elements, transposed: lanes 8i..8i+7 give the addresses of the rows of matrix i, and
// lane 4g+t receives elements (2t, g) and (2t+1, g) of each.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row_address)
                 : "memory");
}

// The same, not transposed: lane 4g+t receives elements (g, 2t) and (g, 2t+1) of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t row_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row_address)
                 : "memory");
}

}  // namespace omniw4::ptx
