// As in wgmma.cuh: done when a wait asks for it. Of products with k contiguous, without a swizzle.
#pragma once

#include "mma_f16.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

namespace omniw4::ptx {

enum class Major { kK, kN };

// The address has more bits than in the real one; 16 bytes further are + 1, as there.
inline uint64_t wgmma_core_matrices(uint32_t address, uint32_t along_k, uint32_t along_n) {
    return uint64_t{along_n / 16} << 46 | uint64_t{along_k / 16} << 32 | address >> 4;
}

template <int n, class T>
void wgmma_product(float* const (&sums)[128], const uint32_t* const (&operands)[128], uint64_t b, bool accumulate) {
    static double a[64][16], x[n][16];
    for (int thread = 0; thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        for (int i = 0; i < 8; ++i) {
            const int r = i / 2;
            a[row + r % 2 * 8][r / 2 * 8 + t * 2 + i % 2] = half_of<T>(operands[thread][r], i % 2);
        }
    }
    const uint32_t address = static_cast<uint32_t>(b) << 4, along_k = static_cast<uint32_t>(b >> 32 & 0x3fff) << 4,
                   along_n = static_cast<uint32_t>(b >> 46) << 4;
    for (int column = 0; column < n; ++column) {
        for (int k = 0; k < 16; ++k) {
            const uint32_t at = address + k / 8 * along_k + column / 8 * along_n + column % 8 * 16 + k % 8 * 2;
            x[column][k] = half_of<T>(shared_at<uint16_t>(at), 0);
        }
    }
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < n / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8,
                      column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            double sum = accumulate ? sums[thread][i] : 0;
            for (int k = 0; k < 16; ++k) sum += a[row][k] * x[column][k];
            sums[thread][i] = static_cast<float>(sum);
        }
    }
}

template <int n, class T, Major order>
void wgmma_m64k16(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(order == Major::kK);
    issue_product(d, a, [b, accumulate](auto& sums, auto& operands) {
        wgmma_product<n, T>(sums, operands, b, accumulate);
    });
}

}  // namespace omniw4::ptx
