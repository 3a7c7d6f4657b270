// Rows of the output that belong to no sequence, those before the first and past the last: zeros.
#pragma once

#include "../common/fragment.cuh"
#include "../omniw4.h"
#include "../ptx/pdl.cuh"

namespace omniw4::attention {

// All lanes of one warp of every block. `width` elements of 16 bits a row, a multiple of 8.
__device__ __forceinline__ void sweep(const AttentionVarlenParams& p, int width) {
    const int rows = static_cast<int>(p.rows);
    const int before = min(max(p.cu_seqlens[0], 0), rows), end = min(max(p.cu_seqlens[p.sequences], before), rows);
    ptx::pdl_wait();
    for (int i = blockIdx.x; i < before + rows - end; i += gridDim.x) {
        const int64_t row = i < before ? i : end + (i - before);
        uint4* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + row * p.out_stride);
        for (int chunk = threadIdx.x % kWarp; chunk < width / 8; chunk += kWarp) out[chunk] = make_uint4(0, 0, 0, 0);
    }
}

}  // namespace omniw4::attention
