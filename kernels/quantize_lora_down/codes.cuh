// The kinds of codes that quantize_lora_down writes. kWholeRow: a scale depends on all of its row. kBlocks: wanted on one
// multiprocessor where there is no low-rank branch, which bounds the registers; 0 leaves that to the compiler.
#pragma once

#include "output.cuh"
#include "transform.cuh"

namespace omniw4::quantize {

// float(clip / kSteps) of the kind, and float(clip / 7).
struct Factors {
    float factor, share;
};

// INT4 and an FP16 scale a group, two codes a byte.
struct Nibbles {
    static constexpr bool kWholeRow = false;
    static constexpr int kSteps = 7;
    static constexpr int kBlocks = 0;

    template <class T>
    static __device__ __forceinline__ void store(const Output<T>& output, const int64_t (&row)[2], int group,
                                                 const Lane& lane, const RowPair& v, const Factors& factors,
                                                 bool owns_codes) {
        uint32_t word[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const __half scale = scale_from_absmax(max_over_quad(absmax16(v[i])), factors.factor);
            const float inverse = inverse_scale(scale);
            word[i][0] = encode_s4x8(v[i], inverse);
            word[i][1] = encode_s4x8(v[i] + 8, inverse);
            if (owns_codes && lane.t == 0) {
                output.store_scale(row[i], group, output.p.cols / kGroup, __half2float(scale));
            }
        }
        if (owns_codes) output.store_s4(row, group, lane, word);
    }
};

// The same codes, a byte each.
struct GroupBytes {
    static constexpr bool kWholeRow = false;
    static constexpr int kSteps = 7;
    static constexpr int kBlocks = 0;

    template <class T>
    static __device__ __forceinline__ void store(const Output<T>& output, const int64_t (&row)[2], int group,
                                                 const Lane& lane, const RowPair& v, const Factors& factors,
                                                 bool owns_codes) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const __half scale = scale_from_absmax(max_over_quad(absmax16(v[i])), factors.factor);
            const float inverse = inverse_scale(scale);
            if (!owns_codes) continue;
            if (lane.t == 0) output.store_scale(row[i], group, output.p.cols / kGroup, __half2float(scale));
            output.store_bytes(
                row[i], group, lane,
                {widen_s4x8(encode_s4x8(v[i], inverse), 1), widen_s4x8(encode_s4x8(v[i] + 8, inverse), 1)});
        }
    }
};

// x' itself, in 16 bits.
struct Values {
    static constexpr bool kWholeRow = false;
    static constexpr int kSteps = 7;
    static constexpr int kBlocks = 0;

    template <class T>
    static __device__ __forceinline__ void store(const Output<T>& output, const int64_t (&row)[2], int group,
                                                 const Lane& lane, const RowPair& v, const Factors&, bool owns_codes) {
        if (!owns_codes) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) output.store_16(row[i], group, lane, v[i]);
    }
};

// INT8 and an FP16 scale a token.
struct TokenBytes {
    static constexpr bool kWholeRow = true;
    static constexpr int kSteps = 127;
    static constexpr int kBlocks = 0;

    struct Row {
        float scale, inverse;
    };
    static __device__ __forceinline__ Row row(float absmax, const Factors& factors) {
        const __half scale = scale_from_absmax(absmax, factors.factor);
        return {__half2float(scale), inverse_scale(scale)};
    }

    template <class T>
    static __device__ __forceinline__ void store(const Output<T>& output, int64_t row, int group, const Lane& lane,
                                                 const float (&v)[16], const Row& of_row, const Factors&) {
        uint2 codes[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            codes[h] = make_uint2(encode_s8x4(v + 8 * h, of_row.inverse), encode_s8x4(v + 8 * h + 4, of_row.inverse));
        }
        output.store_bytes(row, group, lane, codes);
    }
};

// INT4 with a whole number a group and an FP32 scale a token; the codes times their whole numbers, a byte each.
struct IntegerBytes {
    static constexpr bool kWholeRow = true;
    static constexpr int kSteps = 7 * kIntegerScaleMax;
    static constexpr int kBlocks = 2;

    struct Row {
        float scale, inverse;
    };
    static __device__ __forceinline__ Row row(float absmax, const Factors& factors) {
        const float scale = token_scale(absmax, factors.factor);
        return {scale, __frcp_rn(scale)};
    }

    template <class T>
    static __device__ __forceinline__ void store(const Output<T>& output, int64_t row, int group, const Lane& lane,
                                                 const float (&v)[16], const Row& of_row, const Factors& factors) {
        const float absmax = max_over_quad(absmax16(v));
        const float whole = group_steps(absmax, of_row.scale, of_row.inverse, factors.share);
        const float step = __fmul_rn(of_row.scale, whole);
        const float inverse = step == 0.0f ? 0.0f : __frcp_rn(step);
        const auto scale = static_cast<uint32_t>(whole);
        output.store_bytes(
            row, group, lane,
            {widen_s4x8(encode_s4x8(v, inverse), scale), widen_s4x8(encode_s4x8(v + 8, inverse), scale)});
    }
};

}  // namespace omniw4::quantize
