// rms_norm: (residual add) + RMSNorm (+ FP8 codes per row), one read of the row.
#include "../common/launch.h"
#include "../common/row.cuh"
#include "../ptx/pdl.cuh"

namespace omniw4 {
namespace {

template <class T, int kVectors, bool kFp8>
__global__ void __launch_bounds__(kMaxRowThreads) rms_norm_kernel(RmsNormParams p) {
    ptx::pdl_launch_dependents();
    ptx::pdl_wait();
    const int64_t row = blockIdx.x;
    float v[kVectors][8], w[kVectors][8];
    load_row<T, kVectors>(p.x, row * p.row_stride, p.cols, v);
    load_row<T, kVectors>(p.weight, 0, p.cols, w);
    if (p.delta != nullptr) {
        float d[kVectors][8];
        load_row<T, kVectors>(p.delta, row * p.cols, p.cols, d);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = round_to<T>(__fadd_rn(v[i][j], d[i][j]));
        }
        store_row<T, kVectors>(p.sum, row * p.cols, p.cols, v);
    }

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = __fmaf_rn(v[i][j], v[i][j], squares);
    }
    const float mean = __fdiv_rn(over_block<Add>(squares), static_cast<float>(p.cols));
    const float inv_rms = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[i][j] = round_to<T>(__fmul_rn(round_to<T>(__fmul_rn(v[i][j], inv_rms)), w[i][j]));
        }
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
        return fp8 ? &rms_norm_kernel<T, kVectors, true> : &rms_norm_kernel<T, kVectors, false>;
    }
};

template <class T, int kVectors, bool kFp8>
Registration entry(int threads) {
    return registered<rms_norm_kernel<T, kVectors, kFp8>>(threads, 0);
}

const Registration kAll[] = {
    entry<__half, 1, false>(128),        entry<__half, 2, false>(128),        entry<__half, 4, false>(96),
    entry<__half, 1, true>(128),         entry<__half, 2, true>(128),         entry<__half, 4, true>(96),
    entry<__nv_bfloat16, 1, false>(128), entry<__nv_bfloat16, 2, false>(128), entry<__nv_bfloat16, 4, false>(96),
    entry<__nv_bfloat16, 1, true>(128),  entry<__nv_bfloat16, 2, true>(128),  entry<__nv_bfloat16, 4, true>(96),
};

}  // namespace

Status launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
    if (const Status status = check_rows(p.rows, p.cols, p.row_stride); status != Status::kOk) return status;
    if (p.rows == 0) return Status::kOk;
    if (p.x == nullptr || p.weight == nullptr || p.y == nullptr) return Status::kMissing;
    if ((p.delta != nullptr && p.sum == nullptr) || (p.fp8 && p.scales == nullptr)) return Status::kMissing;
    const bool aligned =
        aligned16(p.x) && aligned16(p.delta) && aligned16(p.weight) && aligned16(p.y) && aligned16(p.sum);
    if (!aligned) return Status::kMisaligned;
    return launch_rows_in<Kernels>(p.dtype, p, p.fp8, stream);
}

}  // namespace omniw4
