// attention_varlen: checks, and the choice of a kernel.
#include "../common/launch.h"

namespace omniw4 {

namespace attention {
// Null where sm_90a is not among the architectures compiled for.
[[gnu::weak]] Status launch_attention_sm90a(const AttentionVarlenParams& p, cudaStream_t stream);
}  // namespace attention

namespace {

Status check(const AttentionVarlenParams& p) {
    if (p.rows < 0 || p.rows > INT32_MAX || p.sequences < 0 || p.max_seqlen < 0) return Status::kBadShape;
    if (p.q_heads < 1 || p.kv_heads < 1 || p.q_heads % p.kv_heads != 0) return Status::kBadShape;
    if (p.head_dim != 64 && p.head_dim != 128) return Status::kUnsupported;
    const int64_t width = static_cast<int64_t>(p.q_heads + 2 * static_cast<int64_t>(p.kv_heads)) * p.head_dim;
    if (p.rows > 1 && (p.row_stride < width || p.out_stride < static_cast<int64_t>(p.q_heads) * p.head_dim)) {
        return Status::kBadShape;
    }
    if (width > INT32_MAX || !(p.scale > 0.0f)) return Status::kBadShape;
    if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return Status::kUnsupported;
    if (p.rows == 0) return Status::kOk;
    if (p.qkv == nullptr || p.cu_seqlens == nullptr || p.out == nullptr) return Status::kMissing;
    const bool aligned = aligned16(p.qkv) && aligned16(p.out) && p.row_stride % 8 == 0 && p.out_stride % 8 == 0;
    return aligned ? Status::kOk : Status::kMisaligned;
}

bool is_hopper() {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
           minor == 0;
}

}  // namespace

Status launch_attention_varlen(const AttentionVarlenParams& p, cudaStream_t stream) {
    if (const Status status = check(p); status != Status::kOk) return status;
    if (p.rows == 0) return Status::kOk;
    if (attention::launch_attention_sm90a == nullptr || !is_hopper()) return Status::kUnsupported;
    return attention::launch_attention_sm90a(p, stream);
}

}  // namespace omniw4
