// In place of kernels/common/launch_pdl.h: a launch runs the kernel to its end.
#pragma once

#include "launch.h"

namespace omniw4 {

template <class Params, class... Rest>
Status launch_early_clusters(void (*kernel)(Params, Rest...), dim3 grid, int blocks_of_cluster, int threads,
                             int dynamic_shared_bytes, cudaStream_t, const Params& params, const Rest&... rest) {
    if (dynamic_shared_bytes > emulator::kSharedBytes) return Status::kBadShape;
    emulator::run({grid.x, grid.y, grid.z}, threads, [&] { kernel(params, rest...); }, blocks_of_cluster);
    return Status::kOk;
}

template <class... Parameters>
bool allow_large_clusters(void (*)(Parameters...)) {
    return true;
}

template <class Params, class... Rest>
Status launch_early(void (*kernel)(Params, Rest...), dim3 grid, int threads, int dynamic_shared_bytes,
                    cudaStream_t stream, const Params& params, const Rest&... rest) {
    return launch_early_clusters(kernel, grid, 1, threads, dynamic_shared_bytes, stream, params, rest...);
}

}  // namespace omniw4
