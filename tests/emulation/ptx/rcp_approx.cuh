#pragma once

namespace omniw4::ptx {

inline float rcp_approx(float x) {
    return 1.0f / x;
}

}  // namespace omniw4::ptx
