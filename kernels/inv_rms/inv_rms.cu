// inv_rms: one warp a row, so that a row's bits depend on nothing but the row.
//
// Squares are summed within each group of 64 columns first, a quad of lanes a group, and groups c, c + 4, ... in chain c
// of four: the order in which quantize_lora_down works out the same number for itself.
#include "../common/fragment.cuh"
#include "../common/launch.h"
#include "../common/scalar.cuh"

namespace omniw4 {
namespace {

constexpr int kWarps = 4;
constexpr int kVector = 8;
constexpr int kQuads = 8;

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) inv_rms_kernel(InvRmsParams p, bool vectorized) {
    const int lane = threadIdx.x % kWarp;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (row >= p.rows) return;
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;

    // A quad holds columns 8t..8t+7 and 32+8t..32+8t+7 of a group; the order is the same with and without wide loads.
    const int quad = lane / 4, t = lane % 4;
    float sum = 0.0f;
    for (int64_t first = 0; first < p.cols; first += kGroup * kQuads) {
        float squares = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int64_t column = first + quad * kGroup + h * 32 + t * kVector;
            float v[kVector];
            if (vectorized && column < p.cols) {
                unpack8<T>(*reinterpret_cast<const uint4*>(x + column), v);
            } else {
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    v[j] = column + j < p.cols ? Scalar<T>::to_float(x[column + j]) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < kVector; ++j) squares = __fmaf_rn(v[j], v[j], squares);
        }
        squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, 1));
        squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, 2));
        sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, squares, t * 4));
        sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, squares, t * 4 + 16));
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));

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
