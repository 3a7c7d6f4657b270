#pragma once

namespace omniw4::ptx {

inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const auto& words = emulator::meet_warp({a[0], a[1], a[2], a[3], b[0], b[1]}, [](uint64_t (&w)[32][16]) {
        int rows[16][32], columns[8][32];
        for (int lane = 0; lane < 32; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 16; ++i) {
                const int r = i / 4, k = t * 4 + i % 4;
                rows[g + r % 2 * 8][k + r / 2 * 16] = static_cast<int8_t>(w[lane][r] >> i % 4 * 8);
                if (r < 2) columns[g][k + r * 16] = static_cast<int8_t>(w[lane][4 + r] >> i % 4 * 8);
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                int32_t sum = 0;
                for (int k = 0; k < 32; ++k) sum += rows[lane / 4 + i / 2 * 8][k] * columns[lane % 4 * 2 + i % 2][k];
                w[lane][6 + i] = static_cast<uint32_t>(sum);
            }
        }
    });
    for (int i = 0; i < 4; ++i) {
        d[i] += static_cast<int32_t>(static_cast<uint32_t>(words[emulator::block.current % 32][6 + i]));
    }
}

inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], int32_t c) {
    for (int32_t& sum : d) sum = c;
    mma_m16n8k32_s8(d, a, b);
}

}  // namespace omniw4::ptx
