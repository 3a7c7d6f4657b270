// swiglu: silu(gate) * up (+ FP8 codes per row), gate and up side by side in a row.
#include "../common/launch.h"
#include "../common/row.cuh"
#include "../common/swiglu.cuh"
#include "../ptx/pdl.cuh"

namespace omniw4 {
namespace {

template <class T, int kVectors, bool kFp8>
__global__ void __launch_bounds__(kMaxRowThreads) swiglu_kernel(SwigluParams p) {
    ptx::pdl_launch_dependents();
    ptx::pdl_wait();
    const int64_t row = blockIdx.x;
    float v[kVectors][8], up[kVectors][8];
    load_row<T, kVectors>(p.gate_up, row * p.row_stride, p.cols, v);
    load_row<T, kVectors>(p.gate_up, row * p.row_stride + p.cols, p.cols, up);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = round_to<T>(swiglu(v[i][j], up[i][j]));
    }
    if constexpr (kFp8) {
        store_row_fp8<kVectors>(p.y, p.scales, row, p.cols, v);
    } else {
        store_row<T, kVectors>(p.y, row * p.cols, p.cols, v);
    }
}

struct Kernels {
    template <class T, int kVectors>
    static auto pick(bool fp8) {
        return fp8 ? &swiglu_kernel<T, kVectors, true> : &swiglu_kernel<T, kVectors, false>;
    }
};

template <class T, int kVectors, bool kFp8>
Registration entry(int threads) {
    return registered<swiglu_kernel<T, kVectors, kFp8>>(threads, 0);
}

const Registration kAll[] = {
    entry<__half, 1, false>(128),        entry<__half, 2, false>(128),        entry<__half, 4, false>(96),
    entry<__half, 1, true>(128),         entry<__half, 2, true>(128),         entry<__half, 4, true>(96),
    entry<__nv_bfloat16, 1, false>(128), entry<__nv_bfloat16, 2, false>(128), entry<__nv_bfloat16, 4, false>(96),
    entry<__nv_bfloat16, 1, true>(128),  entry<__nv_bfloat16, 2, true>(128),  entry<__nv_bfloat16, 4, true>(96),
};

}  // namespace

Status launch_swiglu(const SwigluParams& p, cudaStream_t stream) {
    if (const Status status = check_rows(p.rows, p.cols, p.row_stride); status != Status::kOk) return status;
    if (p.rows == 0) return Status::kOk;
    if (p.gate_up == nullptr || p.y == nullptr || (p.fp8 && p.scales == nullptr)) return Status::kMissing;
    if (!aligned16(p.gate_up) || !aligned16(p.y)) return Status::kMisaligned;
    return launch_rows_in<Kernels>(p.dtype, p, p.fp8, stream);
}

}  // namespace omniw4
