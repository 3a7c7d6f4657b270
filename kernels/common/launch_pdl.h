// Host side: a launch that may overlap the end of the kernel before it. Only for kernels that call ptx::pdl_wait()
// before they touch what others write.
//
// All of them ask for as much shared memory as there is, those too that use little: a multiprocessor runs empty before
// its memory is divided anew between shared memory and L1, so kernels that want different shares do not overlap.
#pragma once

#include "launch.h"

namespace omniw4 {

// As clusters of `cluster` blocks along x; more than eight are not portable, and the kernel must allow them.
template <class Params, class... Rest>
Status launch_early_clusters(void (*kernel)(Params, Rest...), dim3 grid, int cluster, int threads,
                             int dynamic_shared_bytes, cudaStream_t stream, const Params& params, const Rest&... rest) {
    const auto carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), carveout, cudaSharedmemCarveoutMaxShared) !=
        cudaSuccess) {
        return Status::kLaunchFailed;
    }
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(dynamic_shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, params, rest...) == cudaSuccess ? Status::kOk : Status::kLaunchFailed;
}

// Lets a kernel have clusters of up to sixteen blocks.
template <class... Parameters>
bool allow_large_clusters(void (*kernel)(Parameters...)) {
    const auto attribute = cudaFuncAttributeNonPortableClusterSizeAllowed;
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, 1) == cudaSuccess;
}

template <class Params, class... Rest>
Status launch_early(void (*kernel)(Params, Rest...), dim3 grid, int threads, int dynamic_shared_bytes,
                    cudaStream_t stream, const Params& params, const Rest&... rest) {
    return launch_early_clusters(kernel, grid, 1, threads, dynamic_shared_bytes, stream, params, rest...);
}

}  // namespace omniw4
