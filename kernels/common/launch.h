// Host side: checks that every launcher shares, and the list of compiled kernels.
#pragma once

#include "../omniw4.h"

#include <atomic>
#include <cstdint>
#include <string_view>

namespace omniw4 {

inline bool aligned16(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Name of the kernel that `kernel` points to, template arguments included, as the compiler spells it.
template <auto kernel>
const char* kernel_name() {
    return __PRETTY_FUNCTION__;
}

// Adds kernels to compiled_kernels() when the module is loaded.
struct Registration {
    Registration(const char* name, const void* function, int threads, int dynamic_shared_bytes);
};

template <auto kernel>
Registration registered(int threads, int dynamic_shared_bytes) {
    return {kernel_name<kernel>(), reinterpret_cast<const void*>(kernel), threads, dynamic_shared_bytes};
}

// A block gets more than 48 KiB of dynamic shared memory only after this, once for each device.
template <auto kernel>
Status allow_shared_memory(int bytes) {
    if (bytes <= 48 * 1024) return Status::kOk;
    static std::atomic<uint64_t> done{0};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return Status::kLaunchFailed;
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (done.load(std::memory_order_relaxed) & bit) return Status::kOk;
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, bytes) != cudaSuccess) {
        return Status::kLaunchFailed;
    }
    done.fetch_or(bit, std::memory_order_relaxed);
    return Status::kOk;
}

inline Status launch_status() {
    return cudaPeekAtLastError() == cudaSuccess ? Status::kOk : Status::kLaunchFailed;
}

template <class... Parameters>
Status launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads, int dynamic_shared_bytes,
                     cudaStream_t stream, const Parameters&... parameters) {
    void* arguments[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    const cudaError_t error =
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(threads)), arguments,
                         static_cast<size_t>(dynamic_shared_bytes), stream);
    return error == cudaSuccess ? Status::kOk : Status::kLaunchFailed;
}

}  // namespace omniw4
