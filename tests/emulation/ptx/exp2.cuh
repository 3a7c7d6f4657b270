#pragma once

#include <cmath>

namespace omniw4::ptx {

// Off by up to two units in the last place, by the last bits of x.
inline float exp2(float x) {
  const float exact = std::exp2(x);
  if (!std::isnormal(exact))
    return std::isnormal(x) && exact < 1.0f ? 0.0f : exact;
  return __uint_as_float(__float_as_uint(exact) - 2 + __float_as_uint(x) % 5);
}

} // namespace omniw4::ptx
