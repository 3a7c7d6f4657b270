// qknorm_rope: eight columns of a head a lane, in place. Values are not touched.
#include "../common/fragment.cuh"
#include "../common/launch.h"
#include "../common/qknorm_rope.cuh"

namespace omniw4 {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) qknorm_rope_kernel(QkNormRopeParams p) {
    const int lanes = p.head_dim / 8, heads = p.q_heads + p.kv_heads;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t item = index / lanes;
    const bool active = item < p.rows * heads;
    const int64_t row = active ? item / heads : 0;
    const int head = active ? static_cast<int>(item % heads) : 0;
    T* address = static_cast<T*>(p.qkv) + row * p.row_stride + head * p.head_dim + (index % lanes) * 8;

    // Lanes past the end compute on zeros: the shuffles below need the whole warp.
    float v[8] = {};
    if (active) unpack8<T>(*reinterpret_cast<const uint4*>(address), v);
    qknorm_rope_head<T>(p, row, head < p.q_heads, v);
    if (active) *reinterpret_cast<uint4*>(address) = pack8<T>(v);
}

template <class T>
Status launch(const QkNormRopeParams& p, cudaStream_t stream) {
    const int64_t threads = p.rows * (p.q_heads + p.kv_heads) * (p.head_dim / 8);
    const int64_t blocks = ceil_div(threads, kThreads);
    if (blocks > 0x7fffffff) return Status::kBadShape;
    qknorm_rope_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
    return launch_status();
}

const Registration kHalf = registered<qknorm_rope_kernel<__half>>(kThreads, 0);
const Registration kBFloat16 = registered<qknorm_rope_kernel<__nv_bfloat16>>(kThreads, 0);

}  // namespace

Status launch_qknorm_rope(const QkNormRopeParams& p, cudaStream_t stream) {
    if (p.rows < 0 || p.q_heads < 1 || p.kv_heads < 1 || p.table_rows < 0) return Status::kBadShape;
    if (p.head_dim != 64 && p.head_dim != 128) return Status::kUnsupported;
    if (p.rows == 0) return Status::kOk;
    if (p.qkv == nullptr || p.cos == nullptr || p.sin == nullptr || p.positions == nullptr) return Status::kMissing;
    const bool aligned = aligned16(p.qkv) && p.row_stride % 8 == 0 && aligned16(p.q_weight) && aligned16(p.k_weight);
    if (!aligned) return Status::kMisaligned;
    switch (p.dtype) {
        case DType::kFloat16: return launch<__half>(p, stream);
        case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    }
    return Status::kUnsupported;
}

}  // namespace omniw4
