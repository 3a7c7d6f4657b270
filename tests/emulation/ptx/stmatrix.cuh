#pragma once

#include "shared_memory.cuh"

namespace omniw4::ptx {

inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&d)[4]) {
    emulator::meet_warp({d[0], d[1], d[2], d[3], address}, [](uint64_t (&w)[32][16]) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            for (int lane = 0; lane < 32; ++lane) {
                for (int i = 0; i < 2; ++i) {
                    const int row = lane / 4, column = lane % 4 * 2 + i;
                    const auto to = static_cast<uint32_t>(w[matrix * 8 + column][4]);
                    if (to % 16 != 0) emulator::fail("stmatrix wants addresses of 16-byte words");
                    shared_at<uint16_t>(to + row * 2) = static_cast<uint16_t>(w[lane][matrix] >> 16 * i);
                }
            }
        }
    });
}

}  // namespace omniw4::ptx
