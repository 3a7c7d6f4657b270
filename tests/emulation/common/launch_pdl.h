// In place of kernels/common/launch_pdl.h: a launch runs the kernel to its end.
#pragma once

#include "launch.h"

namespace omniw4 {

template <class Params, class... Rest>
Status launch_early(void (*kernel)(Params, Rest...), dim3 grid, int threads, int dynamic_shared_bytes, cudaStream_t,
                    const Params& params, const Rest&... rest) {
    if (dynamic_shared_bytes > emulator::kSharedBytes) return Status::kBadShape;
    emulator::run({grid.x, grid.y, grid.z}, threads, [&] { kernel(params, rest...); });
    return Status::kOk;
}

}  // namespace omniw4
