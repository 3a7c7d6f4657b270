#pragma once

namespace omniw4::ptx {

// 2^x with a relative error of at most 2^-22; results below the smallest normal number become 0.
__device__ __forceinline__ float exp2(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

}  // namespace omniw4::ptx
