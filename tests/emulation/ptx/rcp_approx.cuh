#pragma once

namespace omniw4::ptx {

// Off by a unit in the last place or not, by the last bits of x.
inline float rcp_approx(float x) {
    const float exact = 1.0f / x;
    if (!std::isnormal(exact)) return exact;
    return __uint_as_float(__float_as_uint(exact) - 1 + __float_as_uint(x) % 3);
}

}  // namespace omniw4::ptx
