#pragma once

#include "shared_memory.cuh"

namespace omniw4::ptx {

// Lane 4g + t gets elements (g, 2t), (g, 2t + 1) of each of four 8x8 matrices of 16 bits, or with `transposed` (2t, g),
// (2t + 1, g); the rows of matrix i are where lanes 8i .. 8i + 7 point.
inline void ldmatrix(uint32_t (&d)[4], uint32_t row_address, bool transposed) {
    const auto& words = emulator::meet_warp({row_address}, [](auto&) {});
    const int g = emulator::block.current % 32 / 4, t = emulator::block.current % 4;
    const auto element = [&](int matrix, int row, int column) -> uint32_t {
        const auto address = static_cast<uint32_t>(words[matrix * 8 + row][0]);
        return reinterpret_cast<const uint16_t*>(&shared_at<uint64_t>(address, 16))[column];
    };
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = transposed ? element(i, 2 * t, g) : element(i, g, 2 * t);
        const uint32_t high = transposed ? element(i, 2 * t + 1, g) : element(i, g, 2 * t + 1);
        d[i] = low | high << 16;
    }
}

inline void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row_address) {
    ldmatrix(d, row_address, true);
}
inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t row_address) {
    ldmatrix(d, row_address, false);
}

}  // namespace omniw4::ptx
