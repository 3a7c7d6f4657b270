// proj_down on its way from memory to the tensor cores.
#pragma once

#include "../common/fragment.cuh"
#include "../omniw4.h"
#include "../ptx/cp_async.cuh"
#include "../ptx/ldmatrix.cuh"

namespace omniw4::quantize {

constexpr int kStageBytes = kGroup * kRowTile * 2;  // 64 rows of proj_down, 16 columns

// proj_down, one warp's staging buffer: rows of a group, sixteen columns, double-buffered. The 16-byte halves of the
// rows are swizzled so that the eight rows {0, 1} + 8t that one ldmatrix phase reads lie in different banks.
struct ProjDownTile {
    static __device__ __forceinline__ uint32_t offset(int row, int half) {
        const int block = row / 8;
        const int unit = (row * 2 + half) ^ ((block & 1) | ((block & 2) << 1));
        return unit * 16;
    }

    template <class T>
    static __device__ __forceinline__ void fetch(uint32_t buffer, const QuantizeLoraDownParams& p, int group, int tile,
                                                 const Lane& lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i * 16 + lane.index / 2, half = lane.index % 2;
            const T* source = static_cast<const T*>(p.proj_down) +
                              (static_cast<int64_t>(group) * kGroup + row) * p.rank + tile * kRowTile + half * 8;
            ptx::cp_async_16(buffer + offset(row, half), source, true);
        }
    }

    // Operand B of k16 step s for the two n8 tiles: slots 2t, 2t+1 hold columns 32(s/2) + 8t + 4(s%2) + {0, 1} of the
    // group, slots 2t+8, 2t+9 the next two.
    static __device__ __forceinline__ void operand(uint32_t buffer, int step, const Lane& lane, uint32_t (&b)[4]) {
        const int matrix = lane.index / 8, slot = lane.index % 8;
        const int row = step / 2 * 32 + slot / 2 * 8 + step % 2 * 4 + matrix % 2 * 2 + slot % 2;
        ptx::ldmatrix_x4_trans(b, buffer + offset(row, matrix / 2));
    }
};

}  // namespace omniw4::quantize
