#pragma once

namespace omniw4::ptx {

inline float max_nan(float a, float b) {
    if (std::isnan(a) || std::isnan(b)) return NAN;
    return a > b ? a : b;
}

}  // namespace omniw4::ptx
