// quantize_lora_down: checks, and the choice of a compiled kernel.
#include "../common/fragment.cuh"
#include "../common/launch.h"

namespace omniw4 {

namespace quantize {
Status launch_a4(const QuantizeLoraDownParams& p, cudaStream_t stream);
Status launch_a8(const QuantizeLoraDownParams& p, cudaStream_t stream);
Status launch_a16(const QuantizeLoraDownParams& p, cudaStream_t stream);
Status launch_a4_bytes(const QuantizeLoraDownParams& p, cudaStream_t stream);
Status launch_a4_integer(const QuantizeLoraDownParams& p, cudaStream_t stream);

// Null where sm_90a is not among the architectures compiled for.
using Launcher = Status(const QuantizeLoraDownParams& p, cudaStream_t stream);
[[gnu::weak]] Launcher launch_half_sm90a, launch_bfloat16_sm90a;
}  // namespace quantize

Status launch_quantize_lora_down(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    if (p.rows < 0 || p.rows > (int64_t{1} << 31) || p.cols <= 0 || p.cols % kGroup != 0) return Status::kBadShape;
    if (p.rank < 0 || p.rank > kMaxRank || p.rank % kRowTile != 0) return Status::kBadShape;
    if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return Status::kUnsupported;
    if (p.layout == Layout::kMmaS4 && p.act_bits != 4) return Status::kUnsupported;
    if (p.layout != Layout::kCanonical && p.act_bits == 16) return Status::kUnsupported;
    const bool hopper = p.layout == Layout::kWgmmaS8;
    const bool bytes = p.layout == Layout::kMmaS8;
    if (p.integer_scales && !hopper && !bytes) return Status::kUnsupported;
    if (p.norm_weight != nullptr && p.inv_rms == nullptr && !hopper) return Status::kUnsupported;
    if (p.rows == 0) return Status::kOk;
    if (p.x == nullptr || p.qact == nullptr || (p.inv_rms != nullptr && p.norm_weight == nullptr)) {
        return Status::kMissing;
    }
    if (p.act_bits != 16 && p.a_scales == nullptr) return Status::kMissing;
    if (p.rank > 0 && (p.proj_down == nullptr || p.lora_act == nullptr)) return Status::kMissing;
    const bool aligned = aligned16(p.x) && p.row_stride % 8 == 0 && aligned16(p.norm_weight) &&
                         aligned16(p.inv_smooth) && aligned16(p.proj_down) && aligned16(p.qact) &&
                         aligned16(p.lora_act);
    if (!aligned) return Status::kMisaligned;
    if (hopper) {
        quantize::Launcher* const launcher =
            p.dtype == DType::kFloat16 ? quantize::launch_half_sm90a : quantize::launch_bfloat16_sm90a;
        const bool compiled = launcher != nullptr && (p.act_bits == 4 || p.act_bits == 8);
        return compiled ? launcher(p, stream) : Status::kUnsupported;
    }
    switch (p.act_bits) {
        case 4:
            if (!bytes) return quantize::launch_a4(p, stream);
            return p.integer_scales ? quantize::launch_a4_integer(p, stream) : quantize::launch_a4_bytes(p, stream);
        case 8: return quantize::launch_a8(p, stream);
        case 16: return quantize::launch_a16(p, stream);
    }
    return Status::kUnsupported;
}

}  // namespace omniw4
