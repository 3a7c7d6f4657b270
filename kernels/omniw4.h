// The C++ interface of the kernels: plain structs of pointers and sizes, a stream in, a status out.
//
// Nothing here or below knows torch. A kernel never allocates, never synchronises and never changes the current
// device. Shapes: M rows (tokens), K in_features, N out_features, R rank, G = 64 group size; M', N', R' are M, N, R
// rounded up to 16, 128 (64 in kMmaS8) and 16. All pointers are device pointers, aligned to 16 bytes unless a comment says
// otherwise.
#pragma once

#include <cuda_runtime_api.h>
#include <cstdint>
#include <vector>

namespace omniw4 {

constexpr int kGroup = 64;
constexpr int kRowTile = 16;       // M' and R' are multiples of it: m and k of mma.m16n8k16, m of mma.m16n8k64
constexpr int kColumnBlock = 128;  // N' is a multiple of it, but in kMmaS8
constexpr int kMaxRank = 256;

enum class Status : int32_t {
    kOk = 0,
    kBadShape,      // a size the kernel cannot run: see the comment of the field
    kMisaligned,    // a pointer or a row stride that is not a multiple of 16 bytes
    kMissing,       // a pointer that this combination of options needs is null
    kUnsupported,   // dtype, width, head size or layout without a compiled kernel
    kLaunchFailed,  // cudaGetLastError() says what
};

enum class DType : int32_t { kFloat16 = 0, kBFloat16 = 1 };

// Where codes and scales lie; docs/mma-layouts.md draws all but the first.
enum class Layout : int32_t {
    kCanonical = 0,  // qact [M, K/2] nibbles, [M, K] int8 or [M, K] dtype; a_scales [M, K/64] or [M, 1]
    kMmaS4 = 1,      // qact [M'/16, K/64, 32, 16] bytes, a_scales [K/64, M']; 4-bit only
    // qact [M, K] int8; a_scales FP32, [K/64, M'] for 4 bits with FP16 group scales, else [M']
    kMmaS8 = 2,
    // qact [K/128, M', 128] int8 swizzled, K/128 rounded up; a_scales FP32, [K/128, M'/16, 2, 16] for 4 bits with FP16
    // group scales, else [M']; lora_act [R'/16, M'/8, 32, 4] of dtype
    kWgmmaS8 = 3
};

// y[m] = 1 / sqrt(mean(x[m]^2) + eps), in FP32.
struct InvRmsParams {
    const void* x;   // [M, K], rows row_stride elements apart; aligned to 2 bytes
    float* inv_rms;  // [M], aligned to 4 bytes
    int64_t rows, cols, row_stride;
    float eps;
    DType dtype;
};

// x' = rotate(smooth(norm(x))); codes and scales of x', and x' times proj_down. norm_weight without inv_rms: kWgmmaS8
// works out the inverse RMS itself, the same bits as InvRmsParams.
struct QuantizeLoraDownParams {
    const void* x;            // [M, K], rows row_stride elements apart
    const float* inv_rms;     // [M] or null: no RMSNorm; aligned to 4 bytes
    const void* norm_weight;  // [K], with inv_rms
    const float* inv_smooth;  // [K] or null
    const void* proj_down;    // [K, R'] row-major, or null when R' = 0; kWgmmaS8: [K/64, R'/16, 4, 32, 8]
    void* qact;               // see Layout
    void* a_scales;           // FP16 (but see Layout); not written for 16-bit activations
    float* lora_act;          // [M, R'] row-major (but see Layout), or null when R' = 0
    int64_t rows, row_stride;
    int32_t cols;         // multiple of 64
    int32_t rank;         // R', multiple of 16, at most 256
    int32_t act_bits;     // 4 (per token and group), 8 (per token) or 16 (x' itself)
    double clip;          // fraction of absmax that the grid spans
    float eps;            // of the RMS worked out here
    bool rotate;          // multiply each group by H64
    bool integer_scales;  // 4 bits: a small integer for each group times a scale of the token. kMmaS8 and kWgmmaS8
    // kWgmmaS8: no kernel still running writes proj_down, norm_weight or inv_smooth, so that they may be read before the
    // others are done
    bool weights_ready;
    // kWgmmaS8: 64 * number of a cut from 1 on (quantize_lora_down/cut_sm90a.cuh) + groups that a block owns, or 0:
    // chosen by shape. The result does not depend on it
    int32_t cut;
    Layout layout;
    DType dtype;
};

// Row-major FP32 low-rank activations to the A operand of mma.m16n8k16 in dtype.
struct PackLoraActParams {
    const float* lora_act;  // [M, R], aligned to 4 bytes
    void* packed;           // [M'/16, R'/16, 32, 8]; what lies past M and R becomes 0
    int64_t rows;
    int32_t rank;  // R, not rounded
    DType dtype;
};

// Query and key heads of each row: RMSNorm over the head, then rotary embedding (halves of a head are the pairs).
struct QkNormRopeParams {
    void* qkv;                 // [M, >= (q_heads + kv_heads) * head_dim], rows row_stride elements apart; in place
    const void* q_weight;      // [head_dim], or null: no norm
    const void* k_weight;      // the same
    const float* cos;          // [table_rows, head_dim/2]
    const float* sin;          // the same
    const int64_t* positions;  // [M]; outside the table: that row's heads become NaN. Aligned to 8 bytes
    int64_t rows, row_stride, table_rows;
    int32_t q_heads, kv_heads, head_dim;  // head_dim 64 or 128
    float eps;
    DType dtype;
};

// y[m] = RMSNorm(x[m] + delta[m]) * weight, each operation rounded to dtype; or its e4m3 codes with one scale a row.
struct RmsNormParams {
    const void* x;       // [M, K], rows row_stride elements apart
    const void* delta;   // [M, K] or null
    const void* weight;  // [K]
    void* y;             // [M, K] of dtype, or e4m3 with fp8
    void* sum;           // [M, K], x + delta; with delta
    float* scales;       // [M], with fp8; aligned to 4 bytes
    int64_t rows, row_stride;
    int32_t cols;  // K, multiple of 8, at most 16384
    float eps;
    DType dtype;
    bool fp8;
};

// y[m, j] = silu(gate_up[m, j]) * gate_up[m, I + j]; or its e4m3 codes with one scale a row.
struct SwigluParams {
    const void* gate_up;  // [M, 2I], rows row_stride elements apart
    void* y;              // [M, I] of dtype, or e4m3 with fp8
    float* scales;        // [M], with fp8; aligned to 4 bytes
    int64_t rows, row_stride;
    int32_t cols;  // I, multiple of 8, at most 16384
    DType dtype;
    bool fp8;
};

// The columns j of a group, in order, each of the rows on its own, in FP32:
//   code_j = clamp(rint(value_j), -8, 7), change_j = (known_j or value_j) - code_j,
//   value_i += coupling[j, i] * change_j for i > j, product and sum rounded apart.
struct RoundColumnsParams {
    const float* values;    // [batch, 64, rows], aligned to 4 bytes, as are the next but coupling
    const float* coupling;  // [batch, 64, 64]; on and below the diagonal not looked at
    const float* known;     // [batch, 64, rows] or null
    float* codes;           // [batch, 64, rows]
    float* changes;         // [batch, 64, rows]
    int64_t batch, rows;    // batch at most 65535
};

// e4m3 codes of x[m] / scales[m], scales[m] = absmax(x[m]) * (1 / 448).
struct QuantizeFp8Params {
    const void* x;  // [M, K], rows row_stride elements apart
    void* codes;    // [M, K] e4m3
    float* scales;  // [M]; aligned to 4 bytes
    int64_t rows, row_stride;
    int32_t cols;  // K, multiple of 8, at most 16384
    DType dtype;
};

enum class Epilogue : int32_t {
    kPlain = 0,       // y[M, N] = acc
    kResidual = 1,    // y[M, N] = acc + residual
    kSwiglu = 2,      // y[M, N/2] = silu(acc[:, 2j]) * acc[:, 2j+1]
    kQkNormRope = 3,  // y[M, N] = acc rounded to dtype, then as QkNormRopeParams says
};

// acc = sum over groups of (qact . qweight) * a_scale * w_scale + lora_act * proj_up^T + bias, in FP32.
struct GemmLoraUpParams {
    const void* qact;      // see Layout
    const void* a_scales;  // see Layout
    // kMmaS4: [N'/128, K/64, 8, 32, 16] bytes; kMmaS8: [N'/64, K/64, 4, 32, 16]; kWgmmaS8: [N'/64, K/64, 2176], scales
    // inside, or 2112 with row_scales
    const void* qweight;
    const void* w_scales;     // kMmaS4: [N'/128, K/64, 128] FP16; kMmaS8: [N'/64, K/64, 4, 8, 2] FP16, or bytes
    const float* row_scales;  // kMmaS8 and kWgmmaS8 with integer group scales: [N']; else null
    const void* lora_act;     // FP32 [M, R'], or packed (PackLoraActParams); kWgmmaS8: see Layout; null when R' = 0
    const void* proj_up;      // [N', R']; kWgmmaS8: [R'/16, N'/16, 32, 8]; null when R' = 0
    const void* bias;         // [N] or null
    const void* residual;     // [M, N], for kResidual
    void* y;
    QkNormRopeParams heads;  // for kQkNormRope: all but qkv, rows, row_stride and dtype
    int64_t rows;
    int32_t out_features;  // N, multiple of 8; of head_dim for kQkNormRope
    int32_t in_features;   // K, multiple of 64
    int32_t rank;          // R', multiple of 16, at most 256
    bool lora_act_packed;
    // 0: chosen by shape. Rows a block owns, 16, 64 (kMmaS8) or 128; kWgmmaS8: 1 to 5, tuning_sm90a.h. The result does not
    // depend on it
    int32_t tile;
    Epilogue epilogue;  // all but kQkNormRope for kWgmmaS8 without row_scales
    DType dtype;
    Layout layout;     // all but kCanonical
    int32_t act_bits;  // 4, or 8 for all but kMmaS4
    // kWgmmaS8 with row_scales: features from segment_ends[i] on have the next R' columns of lora_act, which is
    // [S R'/16, M'/8, 32, 4] then. Ascending multiples of 64; INT32_MAX where there is no further segment.
    int32_t segment_ends[3];
    bool weights_ready;  // no kernel still running writes qweight: its copies may start before the others are done
};

// out = softmax(scale * q * k^T) * v for each sequence of a pack and each head; rows of no sequence become 0.
struct AttentionVarlenParams {
    const void* qkv;            // [P, (q_heads + 2 * kv_heads) * head_dim], rows row_stride elements apart
    const int32_t* cu_seqlens;  // [sequences + 1], ascending from 0 to at most P; aligned to 4 bytes
    void* out;                  // [P, q_heads * head_dim], rows out_stride elements apart
    int64_t rows;               // P, at most 2^31 - 1
    int64_t row_stride, out_stride;
    int32_t sequences, max_seqlen;        // max_seqlen sizes the grid; the result does not depend on it
    int32_t q_heads, kv_heads, head_dim;  // head_dim 64 or 128
    float scale;                          // above 0
    bool causal;
    DType dtype;
    bool boundaries_ready;  // no kernel still running writes cu_seqlens: it may be read before the others are done
};

Status launch_inv_rms(const InvRmsParams& params, cudaStream_t stream);
Status launch_quantize_lora_down(const QuantizeLoraDownParams& params, cudaStream_t stream);
Status launch_pack_lora_act(const PackLoraActParams& params, cudaStream_t stream);
Status launch_qknorm_rope(const QkNormRopeParams& params, cudaStream_t stream);
Status launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);
Status launch_swiglu(const SwigluParams& params, cudaStream_t stream);
Status launch_quantize_fp8(const QuantizeFp8Params& params, cudaStream_t stream);
Status launch_round_columns(const RoundColumnsParams& params, cudaStream_t stream);
Status launch_gemm_lora_up(const GemmLoraUpParams& params, cudaStream_t stream);
Status launch_attention_varlen(const AttentionVarlenParams& params, cudaStream_t stream);

// One compiled kernel, for reports and for loading everything before a graph is captured.
struct KernelInfo {
    const char* name;  // as the compiler spells it
    const void* function;
    int threads;
    int dynamic_shared_bytes;
};

const std::vector<KernelInfo>& compiled_kernels();

}  // namespace omniw4
