#pragma once

namespace omniw4::ptx {

// 1 / x, off by at most one unit in the last place; subnormal numbers count as zeros.
__device__ __forceinline__ float rcp_approx(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

}  // namespace omniw4::ptx
