// qknorm_rope: eight columns of a head a lane, in place; one row and as many heads as 128 threads hold a block. Values
// are not touched.
#include "../common/fragment.cuh"
#include "../common/launch_pdl.h"
#include "../common/qknorm_rope.cuh"
#include "../ptx/pdl.cuh"

namespace omniw4 {
namespace {

constexpr int kThreads = 128;

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads) qknorm_rope_kernel(QkNormRopeParams p) {
    ptx::pdl_launch_dependents();
    ptx::pdl_wait();
    constexpr int kLanes = kHeadDim / 8;
    const int64_t row = blockIdx.x;
    const int head = blockIdx.y * (kThreads / kLanes) + threadIdx.x / kLanes;
    const bool active = head < p.q_heads + p.kv_heads;
    T* address = static_cast<T*>(p.qkv) + row * p.row_stride + head * kHeadDim + (threadIdx.x % kLanes) * 8;

    // Lanes past the end compute on zeros: the shuffles below need the whole warp.
    uint4 x = make_uint4(0, 0, 0, 0);
    if (active) x = *reinterpret_cast<const uint4*>(address);
    x = qknorm_rope_head<T, kHeadDim>(p, row, head < p.q_heads, x);
    if (active) *reinterpret_cast<uint4*>(address) = x;
}

template <class T, int kHeadDim>
Status launch(const QkNormRopeParams& p, cudaStream_t stream) {
    constexpr int kHeads = kThreads / (kHeadDim / 8);
    const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(ceil_div(p.q_heads + p.kv_heads, kHeads)));
    return launch_early(&qknorm_rope_kernel<T, kHeadDim>, grid, kThreads, 0, stream, p);
}

template <class T>
Status launch(const QkNormRopeParams& p, cudaStream_t stream) {
    return p.head_dim == 64 ? launch<T, 64>(p, stream) : launch<T, 128>(p, stream);
}

const Registration kAll[] = {
    registered<qknorm_rope_kernel<__half, 64>>(kThreads, 0),
    registered<qknorm_rope_kernel<__half, 128>>(kThreads, 0),
    registered<qknorm_rope_kernel<__nv_bfloat16, 64>>(kThreads, 0),
    registered<qknorm_rope_kernel<__nv_bfloat16, 128>>(kThreads, 0),
};

}  // namespace

Status launch_qknorm_rope(const QkNormRopeParams& p, cudaStream_t stream) {
    if (p.rows < 0 || p.q_heads < 1 || p.kv_heads < 1 || p.table_rows < 0) return Status::kBadShape;
    if (p.head_dim != 64 && p.head_dim != 128) return Status::kUnsupported;
    if (p.rows == 0) return Status::kOk;
    if (p.qkv == nullptr || p.cos == nullptr || p.sin == nullptr || p.positions == nullptr) return Status::kMissing;
    if (p.rows > 0x7fffffff || p.q_heads + p.kv_heads > 0x7fff) return Status::kBadShape;
    const bool aligned = aligned16(p.qkv) && p.row_stride % 8 == 0 && aligned16(p.q_weight) && aligned16(p.k_weight) &&
                         aligned16(p.cos) && aligned16(p.sin);
    if (!aligned) return Status::kMisaligned;
    switch (p.dtype) {
        case DType::kFloat16: return launch<__half>(p, stream);
        case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    }
    return Status::kUnsupported;
}

}  // namespace omniw4
