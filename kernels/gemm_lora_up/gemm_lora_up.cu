// gemm_lora_up: checks, and the choice of an epilogue.
#include "../common/fragment.cuh"
#include "../common/launch.h"
#include "choose_integer_sm90a.h"

namespace omniw4 {

namespace gemm {
Status launch_s4_plain_sm80(const GemmLoraUpParams& p, cudaStream_t stream);
Status launch_s4_residual_sm80(const GemmLoraUpParams& p, cudaStream_t stream);
Status launch_s4_swiglu_sm80(const GemmLoraUpParams& p, cudaStream_t stream);
Status launch_s4_qknorm_rope_sm80(const GemmLoraUpParams& p, cudaStream_t stream);
Status launch_s8_half_sm80(const GemmLoraUpParams& p, cudaStream_t stream);
Status launch_s8_bfloat16_sm80(const GemmLoraUpParams& p, cudaStream_t stream);

// Null where sm_90a is not among the architectures compiled for.
using Launcher = Status(const GemmLoraUpParams& p, cudaStream_t stream);
[[gnu::weak]] Launcher launch_a4_plain_sm90a, launch_a4_residual_sm90a, launch_a4_swiglu_sm90a;
[[gnu::weak]] Launcher launch_a8_plain_sm90a, launch_a8_residual_sm90a, launch_a8_swiglu_sm90a;
using IntegerLauncher = Status(const GemmLoraUpParams& p, sm90a::integer::TileChoice tile, int multiprocessors,
                               cudaStream_t stream);
[[gnu::weak]] IntegerLauncher launch_integer_half_low_sm90a, launch_integer_bfloat16_low_sm90a;
[[gnu::weak]] IntegerLauncher launch_integer_half_high_sm90a, launch_integer_bfloat16_high_sm90a;
[[gnu::weak]] IntegerLauncher launch_integer_half_cluster_sm90a, launch_integer_bfloat16_cluster_sm90a;
}  // namespace gemm

namespace {

Status check_heads(const GemmLoraUpParams& p) {
    const QkNormRopeParams& h = p.heads;
    if (h.head_dim != 64 && h.head_dim != 128) return Status::kUnsupported;
    if (h.q_heads < 1 || h.kv_heads < 1 || h.table_rows < 0 || p.out_features % h.head_dim != 0 ||
        static_cast<int64_t>(h.q_heads + h.kv_heads) * h.head_dim > p.out_features) {
        return Status::kBadShape;
    }
    if (h.cos == nullptr || h.sin == nullptr || h.positions == nullptr) return Status::kMissing;
    const bool aligned = aligned16(h.q_weight) && aligned16(h.k_weight) && aligned16(h.cos) && aligned16(h.sin);
    return aligned ? Status::kOk : Status::kMisaligned;
}

bool known_tile(const GemmLoraUpParams& p) {
    if (p.layout == Layout::kWgmmaS8) {
        return p.tile >= 0 && p.tile <= (p.row_scales != nullptr ? gemm::sm90a::integer::kTileChoices : 5);
    }
    return p.tile == 0 || p.tile == 16 || p.tile == 128 || (p.tile == 64 && p.layout == Layout::kMmaS8);
}

Status check(const GemmLoraUpParams& p) {
    if (p.rows < 0 || p.rows > (int64_t{1} << 31)) return Status::kBadShape;
    if (p.out_features <= 0 || p.out_features % 8 != 0) return Status::kBadShape;
    if (p.in_features <= 0 || p.in_features % kGroup != 0) return Status::kBadShape;
    if (p.rank < 0 || p.rank > kMaxRank || p.rank % kRowTile != 0) return Status::kBadShape;
    if (!known_tile(p)) return Status::kUnsupported;
    if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return Status::kUnsupported;
    const bool complete = p.rows == 0 || (p.qact != nullptr && p.a_scales != nullptr && p.y != nullptr);
    const bool scales = p.w_scales != nullptr || p.layout == Layout::kWgmmaS8;
    if (!complete || p.qweight == nullptr || !scales) return Status::kMissing;
    if (p.rank > 0 && p.rows > 0 && (p.lora_act == nullptr || p.proj_up == nullptr)) return Status::kMissing;
    if (p.epilogue == Epilogue::kResidual && p.rows > 0 && p.residual == nullptr) return Status::kMissing;
    const void* pointers[] = {p.qact,     p.a_scales, p.qweight, p.w_scales, p.row_scales,
                              p.lora_act, p.proj_up,  p.bias,    p.residual, p.y};
    for (const void* pointer : pointers) {
        if (!aligned16(pointer)) return Status::kMisaligned;
    }
    return p.epilogue == Epilogue::kQkNormRope && p.rows > 0 ? check_heads(p) : Status::kOk;
}

Status launch_integer(const GemmLoraUpParams& p, cudaStream_t stream) {
    int previous = 0;
    for (const int end : p.segment_ends) {
        if (end % 64 != 0 && end != INT32_MAX) return Status::kBadShape;
        if (end <= previous && end != INT32_MAX) return Status::kBadShape;
        previous = end;
    }
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        return Status::kLaunchFailed;
    }
    using namespace gemm::sm90a::integer;
    const int64_t features = round_up(p.out_features, kColumnBlock);
    const int head_dim = p.epilogue == Epilogue::kQkNormRope ? p.heads.head_dim : 0;
    const TileChoice tile = p.tile != 0 ? static_cast<TileChoice>(p.tile)
                                        : choose_tile(p.rows, features, p.in_features, multiprocessors, head_dim);
    const int number = static_cast<int>(tile);
    if (head_dim > 0 && kCosts[number - 1].features % head_dim != 0) return Status::kUnsupported;
    const bool half = p.dtype == DType::kFloat16;
    gemm::IntegerLauncher* launcher = nullptr;
    if (number >= kFirstCluster) {
        launcher = half ? gemm::launch_integer_half_cluster_sm90a : gemm::launch_integer_bfloat16_cluster_sm90a;
    } else if (number >= kFirstHigh) {
        launcher = half ? gemm::launch_integer_half_high_sm90a : gemm::launch_integer_bfloat16_high_sm90a;
    } else {
        launcher = half ? gemm::launch_integer_half_low_sm90a : gemm::launch_integer_bfloat16_low_sm90a;
    }
    return launcher != nullptr ? launcher(p, tile, multiprocessors, stream) : Status::kUnsupported;
}

Status launch_wgmma(const GemmLoraUpParams& p, cudaStream_t stream) {
    if (p.act_bits != 4 && p.act_bits != 8) return Status::kUnsupported;
    if (p.row_scales != nullptr) return launch_integer(p, stream);
    const bool narrow = p.act_bits == 4;
    gemm::Launcher* launcher = nullptr;
    switch (p.epilogue) {
        case Epilogue::kPlain: launcher = narrow ? gemm::launch_a4_plain_sm90a : gemm::launch_a8_plain_sm90a; break;
        case Epilogue::kResidual:
            launcher = narrow ? gemm::launch_a4_residual_sm90a : gemm::launch_a8_residual_sm90a;
            break;
        case Epilogue::kSwiglu: launcher = narrow ? gemm::launch_a4_swiglu_sm90a : gemm::launch_a8_swiglu_sm90a; break;
        case Epilogue::kQkNormRope: break;
    }
    const bool compiled = launcher != nullptr && (narrow || p.act_bits == 8);
    return compiled ? launcher(p, stream) : Status::kUnsupported;
}

Status launch_mma_s8(const GemmLoraUpParams& p, cudaStream_t stream) {
    if (p.act_bits != 4 && p.act_bits != 8) return Status::kUnsupported;
    return p.dtype == DType::kFloat16 ? gemm::launch_s8_half_sm80(p, stream) : gemm::launch_s8_bfloat16_sm80(p, stream);
}

}  // namespace

Status launch_gemm_lora_up(const GemmLoraUpParams& p, cudaStream_t stream) {
    if (const Status status = check(p); status != Status::kOk || p.rows == 0) return status;
    if (p.layout == Layout::kWgmmaS8) return launch_wgmma(p, stream);
    if (p.layout == Layout::kMmaS8) return launch_mma_s8(p, stream);
    if (p.layout != Layout::kMmaS4 || p.act_bits != 4 || p.row_scales != nullptr) return Status::kUnsupported;
    switch (p.epilogue) {
        case Epilogue::kPlain: return gemm::launch_s4_plain_sm80(p, stream);
        case Epilogue::kResidual: return gemm::launch_s4_residual_sm80(p, stream);
        case Epilogue::kSwiglu: return gemm::launch_s4_swiglu_sm80(p, stream);
        case Epilogue::kQkNormRope: return gemm::launch_s4_qknorm_rope_sm80(p, stream);
    }
    return Status::kUnsupported;
}

}  // namespace omniw4
