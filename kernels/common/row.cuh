// One block a row: how a row lies in the registers of a block, sums and maxima over it, and its FP8 form.
//
// Thread t of n holds the vectors t, t + n, t + 2n, ... of eight columns each; what lies past the row is 0. Which thread
// holds a column depends on the width alone, so a row's bits do not depend on the number of rows.
#pragma once

#include "../ptx/max_nan.cuh"
#include "fragment.cuh"
#include "launch_pdl.h"
#include "scalar.cuh"

#include <cuda_fp8.h>

namespace omniw4 {

constexpr int kRowVector = 8;
constexpr int kMaxRowThreads = 512;
constexpr int kMaxRowVectors = 4;
constexpr int kMaxRow = kMaxRowThreads * kMaxRowVectors * kRowVector;
constexpr float kFp8Step = 1.0f / 448.0f;  // 448 is the largest e4m3
constexpr float kFp8ScaleMin = 0x1p-100f;  // so that the reciprocal of a scale is finite

template <class T, int kVectors>
__device__ __forceinline__ void load_row(const void* base, int64_t offset, int cols, float (&v)[kVectors][8]) {
    const uint4* row = reinterpret_cast<const uint4*>(static_cast<const T*>(base) + offset);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * blockDim.x;
        const bool inside = vector * kRowVector < cols;
        unpack8<T>(inside ? row[vector] : make_uint4(0, 0, 0, 0), v[i]);
    }
}

template <class T, int kVectors>
__device__ __forceinline__ void store_row(void* base, int64_t offset, int cols, const float (&v)[kVectors][8]) {
    uint4* row = reinterpret_cast<uint4*>(static_cast<T*>(base) + offset);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * blockDim.x;
        if (vector * kRowVector < cols) row[vector] = pack8<T>(v[i]);
    }
}

struct Add {
    static __device__ __forceinline__ float apply(float a, float b) { return __fadd_rn(a, b); }
};
struct MaxNan {
    static __device__ __forceinline__ float apply(float a, float b) { return ptx::max_nan(a, b); }
};

// The same value in every thread. Called at most once for each operation in a kernel: its shared memory is not reused.
template <class Operation>
__device__ __forceinline__ float over_block(float value) {
    __shared__ float of_warp[kMaxRowThreads / kWarp];
#pragma unroll
    for (int mask = 1; mask < kWarp; mask *= 2) {
        value = Operation::apply(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    float total = of_warp[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) {
        total = Operation::apply(total, of_warp[warp]);
    }
    return total;
}

// Codes and scale of a row: scale = absmax * (1 / 448), code = e4m3(v / scale). A row of zeros has scale 0.
template <int kVectors>
__device__ __forceinline__ void store_row_fp8(void* codes, float* scales, int64_t row, int cols,
                                              const float (&v)[kVectors][8]) {
    float absmax = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) absmax = ptx::max_nan(absmax, fabsf(v[i][j]));
    }
    absmax = over_block<MaxNan>(absmax);
    const float scale = absmax == 0.0f ? 0.0f : ptx::max_nan(__fmul_rn(absmax, kFp8Step), kFp8ScaleMin);
    const float inverse = absmax == 0.0f ? 0.0f : __frcp_rn(scale);
    if (threadIdx.x == 0) scales[row] = scale;
    uint2* out = reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + row * cols);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * blockDim.x;
        if (vector * kRowVector >= cols) continue;
        uint32_t word[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float2 pair = make_float2(__fmul_rn(v[i][j], inverse), __fmul_rn(v[i][j + 1], inverse));
            const uint32_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
            word[j / 4] |= two << (j % 4 * 8);
        }
        out[vector] = make_uint2(word[0], word[1]);
    }
}

// How many threads hold a row of `cols` columns, `vectors` vectors each.
inline int row_threads(int cols, int vectors) {
    return static_cast<int>(round_up(ceil_div(cols, kRowVector * vectors), kWarp));
}

// One block for each of p.rows rows. Kernels::pick<T, kVectors>(fp8) is the kernel; up to 128 threads need as few vectors
// each as can be, and wider rows get more threads.
template <class Kernels, class T, class Params>
Status launch_rows(const Params& p, bool fp8, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(p.rows));
    if (p.cols <= 1024) {
        return launch_early(Kernels::template pick<T, 1>(fp8), grid, row_threads(p.cols, 1), 0, stream, p);
    }
    if (p.cols <= 2048) {
        return launch_early(Kernels::template pick<T, 2>(fp8), grid, row_threads(p.cols, 2), 0, stream, p);
    }
    return launch_early(Kernels::template pick<T, kMaxRowVectors>(fp8), grid, row_threads(p.cols, kMaxRowVectors), 0,
                        stream, p);
}

template <class Kernels, class Params>
Status launch_rows_in(DType dtype, const Params& p, bool fp8, cudaStream_t stream) {
    switch (dtype) {
        case DType::kFloat16: return launch_rows<Kernels, __half>(p, fp8, stream);
        case DType::kBFloat16: return launch_rows<Kernels, __nv_bfloat16>(p, fp8, stream);
    }
    return Status::kUnsupported;
}

// What every launcher of this kind checks of its sizes.
inline Status check_rows(int64_t rows, int cols, int64_t row_stride) {
    if (rows < 0 || rows > 0x7fffffff || cols < 1 || cols > kMaxRow || cols % kRowVector != 0) return Status::kBadShape;
    return row_stride % kRowVector == 0 ? Status::kOk : Status::kMisaligned;
}

}  // namespace omniw4
