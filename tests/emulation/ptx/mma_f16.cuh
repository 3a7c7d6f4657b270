// Products are exact in FP64 and added to the accumulator with one rounding: hardware rounds more often.
#pragma once

namespace omniw4::ptx {

template <class T>
float half_of(uint64_t word, int half) {
    const auto bits = static_cast<uint16_t>(word >> 16 * half);
    T value;
    std::memcpy(&value, &bits, 2);
    if constexpr (std::is_same_v<T, __half>) return __half2float(value);
    if constexpr (!std::is_same_v<T, __half>) return __bfloat162float(value);
}

inline float float_of(uint64_t word) {
    const auto bits = static_cast<uint32_t>(word);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const auto& words = emulator::meet_warp(
        {a[0], a[1], a[2], a[3], b[0], b[1], bits_of(d[0]), bits_of(d[1]), bits_of(d[2]), bits_of(d[3])},
        [](uint64_t (&w)[32][16]) {
            double rows[16][16], columns[8][16];
            for (int lane = 0; lane < 32; ++lane) {
                const int g = lane / 4, t = lane % 4;
                for (int i = 0; i < 8; ++i) {
                    const int r = i / 2, k = 2 * t + i % 2;
                    rows[g + r % 2 * 8][k + r / 2 * 8] = half_of<T>(w[lane][r], i % 2);
                    if (r < 2) columns[g][k + r * 8] = half_of<T>(w[lane][4 + r], i % 2);
                }
            }
            for (int lane = 0; lane < 32; ++lane) {
                for (int i = 0; i < 4; ++i) {
                    double sum = 0;
                    for (int k = 0; k < 16; ++k) {
                        sum += rows[lane / 4 + i / 2 * 8][k] * columns[lane % 4 * 2 + i % 2][k];
                    }
                    w[lane][10 + i] = bits_of(static_cast<float>(float_of(w[lane][6 + i]) + sum));
                }
            }
        });
    for (int i = 0; i < 4; ++i) d[i] = float_of(words[emulator::block.current % 32][10 + i]);
}

}  // namespace omniw4::ptx
