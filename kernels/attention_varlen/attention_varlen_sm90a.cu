// attention_varlen, sm_90a: both dtypes and head sizes.
#include "attention_varlen_sm90a.cuh"

namespace omniw4::attention {

namespace {

// The same whatever the lengths: another tile would sum in another order, and a sequence's bits would depend on the
// choice. 128 is as fast: slower by 0.9 us for sequences of one tile, faster by 3% for very long ones (H200).
constexpr int kKeyTile = 64;

template <class T, int head_dim>
Registration entry() {
    return registered<attention_varlen_sm90a_kernel<T, head_dim, kKeyTile>>(kThreads, Plan<head_dim, kKeyTile>::kBytes);
}

const Registration kKernels[] = {entry<__half, 64>(), entry<__half, 128>(), entry<__nv_bfloat16, 64>(),
                                 entry<__nv_bfloat16, 128>()};

template <class T>
Status launch_head(const AttentionVarlenParams& p, cudaStream_t stream) {
    return p.head_dim == 128 ? launch_tile<T, 128, kKeyTile>(p, stream) : launch_tile<T, 64, kKeyTile>(p, stream);
}

}  // namespace

Status launch_attention_sm90a(const AttentionVarlenParams& p, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_head<__half>(p, stream) : launch_head<__nv_bfloat16>(p, stream);
}

}  // namespace omniw4::attention
