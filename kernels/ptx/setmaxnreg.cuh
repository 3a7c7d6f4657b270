#pragma once

namespace omniw4::ptx {

// A warpgroup gives registers back to its block, or takes them once others have given them. Multiples of 8.
template <int registers>
__device__ __forceinline__ void setmaxnreg_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace omniw4::ptx
