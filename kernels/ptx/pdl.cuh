// Programmatic dependent launch: a kernel may start before the one before it in the stream is done. On GPUs before sm_90
// kernels never overlap so, and these do nothing.
#pragma once

namespace omniw4::ptx {

// Lets the next kernel of the stream start, if it was launched to do so, once every block has come here or has ended.
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before are done and their writes visible. Nothing they write, and nothing they may still read,
// is touched before this.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace omniw4::ptx
