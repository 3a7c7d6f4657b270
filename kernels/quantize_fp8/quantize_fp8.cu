// quantize_fp8: e4m3 codes and one FP32 scale a row.
#include "../common/launch.h"
#include "../common/row.cuh"
#include "../ptx/pdl.cuh"

namespace omniw4 {
namespace {

template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxRowThreads) quantize_fp8_kernel(QuantizeFp8Params p) {
    ptx::pdl_launch_dependents();
    ptx::pdl_wait();
    const int64_t row = blockIdx.x;
    float v[kVectors][8];
    load_row<T, kVectors>(p.x, row * p.row_stride, p.cols, v);
    store_row_fp8<kVectors>(p.codes, p.scales, row, p.cols, v);
}

struct Kernels {
    template <class T, int kVectors>
    static auto pick(bool) {
        return &quantize_fp8_kernel<T, kVectors>;
    }
};

template <class T, int kVectors>
Registration entry(int threads) {
    return registered<quantize_fp8_kernel<T, kVectors>>(threads, 0);
}

const Registration kAll[] = {
    entry<__half, 1>(128),        entry<__half, 2>(128),        entry<__half, 4>(96),
    entry<__nv_bfloat16, 1>(128), entry<__nv_bfloat16, 2>(128), entry<__nv_bfloat16, 4>(96),
};

}  // namespace

Status launch_quantize_fp8(const QuantizeFp8Params& p, cudaStream_t stream) {
    if (const Status status = check_rows(p.rows, p.cols, p.row_stride); status != Status::kOk) return status;
    if (p.rows == 0) return Status::kOk;
    if (p.x == nullptr || p.codes == nullptr || p.scales == nullptr) return Status::kMissing;
    if (!aligned16(p.x) || !aligned16(p.codes)) return Status::kMisaligned;
    return launch_rows_in<Kernels>(p.dtype, p, true, stream);
}

}  // namespace omniw4
