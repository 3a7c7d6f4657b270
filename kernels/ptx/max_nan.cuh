#pragma once

namespace omniw4::ptx {

// The larger number; NaN when either is NaN (fmaxf would drop it, and a broken token would look like a sound one).
__device__ __forceinline__ float max_nan(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

}  // namespace omniw4::ptx
