// attention_varlen, sm_90a: both dtypes and head sizes.
#include "attention_varlen_sm90a.cuh"

namespace omniw4::attention {

namespace {

constexpr int kKeyTile = 64;

template <class T>
Status launch_head(const AttentionVarlenParams& p, cudaStream_t stream) {
    return p.head_dim == 128 ? launch_tile<T, 128, kKeyTile, true, true>(p, stream)
                             : launch_tile<T, 64, kKeyTile, true, true>(p, stream);
}

const Registration kHalf64 =
    registered<attention_varlen_sm90a_kernel<__half, 64, kKeyTile, true, true>>(kThreads, Plan<64, kKeyTile>::kBytes);
const Registration kHalf128 =
    registered<attention_varlen_sm90a_kernel<__half, 128, kKeyTile, true, true>>(kThreads, Plan<128, kKeyTile>::kBytes);
const Registration kBFloat64 = registered<attention_varlen_sm90a_kernel<__nv_bfloat16, 64, kKeyTile, true, true>>(
    kThreads, Plan<64, kKeyTile>::kBytes);
const Registration kBFloat128 = registered<attention_varlen_sm90a_kernel<__nv_bfloat16, 128, kKeyTile, true, true>>(
    kThreads, Plan<128, kKeyTile>::kBytes);

}  // namespace

Status launch_attention_sm90a(const AttentionVarlenParams& p, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_head<__half>(p, stream) : launch_head<__nv_bfloat16>(p, stream);
}

}  // namespace omniw4::attention
