// Host side: a launch that may overlap the end of the kernel before it. Only for kernels that call ptx::pdl_wait()
// before they touch what others write.
#pragma once

#include "launch.h"

namespace omniw4 {

template <class Params, class... Rest>
Status launch_early(void (*kernel)(Params, Rest...), dim3 grid, int threads, int dynamic_shared_bytes,
                    cudaStream_t stream, const Params& params, const Rest&... rest) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(dynamic_shared_bytes);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, params, rest...) == cudaSuccess ? Status::kOk : Status::kLaunchFailed;
}

}  // namespace omniw4
