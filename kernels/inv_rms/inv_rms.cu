// inv_rms: one warp a row, so that a row's bits depend on nothing but the row.
#include "../common/fragment.cuh"
#include "../common/launch.h"
#include "../common/scalar.cuh"

namespace omniw4 {
namespace {

constexpr int kWarps = 4;
constexpr int kVector = 8;

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) inv_rms_kernel(InvRmsParams p, bool vectorized) {
    const int lane = threadIdx.x % kWarp;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (row >= p.rows) return;
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;

    // Lane i sums runs of eight columns i, i + 32, ...; the order is the same with and without wide loads.
    float sum = 0.0f;
    for (int64_t first = lane * kVector; first < p.cols; first += kWarp * kVector) {
        float v[kVector];
        if (vectorized) {
            unpack8<T>(*reinterpret_cast<const uint4*>(x + first), v);
        } else {
#pragma unroll
            for (int j = 0; j < kVector; ++j) v[j] = first + j < p.cols ? Scalar<T>::to_float(x[first + j]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum = __fmaf_rn(v[j], v[j], sum);
    }
#pragma unroll
    for (int mask = 1; mask < kWarp; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));

    const float mean = __fdiv_rn(sum, static_cast<float>(p.cols));
    if (lane == 0) p.inv_rms[row] = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
}

template <class T>
Status launch(const InvRmsParams& p, cudaStream_t stream) {
    const bool vectorized = p.cols % kVector == 0 && p.row_stride % kVector == 0 && aligned16(p.x);
    const auto blocks = static_cast<unsigned>(ceil_div(p.rows, kWarps));
    inv_rms_kernel<T><<<blocks, kWarps * kWarp, 0, stream>>>(p, vectorized);
    return launch_status();
}

const Registration kHalf = registered<inv_rms_kernel<__half>>(kWarps * kWarp, 0);
const Registration kBFloat16 = registered<inv_rms_kernel<__nv_bfloat16>>(kWarps * kWarp, 0);

}  // namespace

Status launch_inv_rms(const InvRmsParams& p, cudaStream_t stream) {
    if (p.rows < 0 || p.cols < 1 || p.rows > (int64_t{1} << 31)) return Status::kBadShape;
    if (p.rows == 0) return Status::kOk;
    if (p.x == nullptr || p.inv_rms == nullptr) return Status::kMissing;
    switch (p.dtype) {
        case DType::kFloat16: return launch<__half>(p, stream);
        case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    }
    return Status::kUnsupported;
}

}  // namespace omniw4
