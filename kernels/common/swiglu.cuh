// silu(gate) * up, the same for the op and for every epilogue.
#pragma once

#include "../ptx/exp2.cuh"
#include "../ptx/rcp_approx.cuh"

namespace omniw4 {

// Of fast forms: what they miss, some 1e-6 of the value, is far below a rounding to 16 bits, and exact ones would take
// longer than the memory. 0 where the sigmoid is below the smallest normal number.
__device__ __forceinline__ float swiglu(float gate, float up) {
    constexpr float kMinusLog2E = -1.4426950408889634f;
    const float sigmoid = ptx::rcp_approx(__fadd_rn(1.0f, ptx::exp2(__fmul_rn(gate, kMinusLog2E))));
    return __fmul_rn(__fmul_rn(gate, sigmoid), up);
}

}  // namespace omniw4
