#pragma once

namespace omniw4::ptx {

inline uint32_t saturated(int32_t value, int32_t limit, uint32_t mask) {
    return static_cast<uint32_t>(value < -limit ? -limit : value >= limit ? limit - 1 : value) & mask;
}

inline uint32_t cvt_pack_s4(int32_t high, int32_t low, uint32_t rest) {
    return rest << 8 | saturated(high, 8, 15) << 4 | saturated(low, 8, 15);
}
inline uint32_t cvt_pack_s8(int32_t high, int32_t low, uint32_t rest) {
    return rest << 16 | saturated(high, 128, 255) << 8 | saturated(low, 128, 255);
}

}  // namespace omniw4::ptx
