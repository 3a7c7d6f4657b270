// A consumer warpgroup: 64 features (or 128) of the tile by all its tokens.
//
// A part is 64 features by up to 64 tokens of one group: two wgmma k32 steps into fresh int32 accumulators, whose sums
// are then scaled into FP32. Several parts are under way at a time, so that tensor cores multiply one while CUDA cores
// scale another. The compiler must know at every point which accumulators are in flight, or it waits for all of them
// (ptxas says so, C7510 to C7519): so buffers rotate at compile time over a chunk of groups, and none is in flight
// between chunks.
//
// Sixteen tokens of the output are two n8 tiles, and a lane holds columns 2t, 2t + 1 of both. The quantizer stores tokens
// 4t, 4t + 1 in those columns of the first and 4t + 2, 4t + 3 in those of the second, so a lane's four tokens are
// neighbours and their scales one 16-byte load.
#pragma once

#include "../common/epilogue.cuh"
#include "../ptx/bar_sync.cuh"
#include "../ptx/mma_f16.cuh"
#include "../ptx/shared_memory.cuh"
#include "../ptx/wgmma.cuh"
#include "pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a {

template <int number>
struct Number {
    static constexpr int value = number;
};

// f(Number<0>), f(Number<1>), ...: what depends on the number is known to the compiler.
template <int count, int first = 0, class F>
__device__ __forceinline__ void static_for(F&& f) {
    if constexpr (first < count) {
        f(Number<first>{});
        static_for<count, first + 1>(f);
    }
}

// Keeps the compiler from moving uses of registers that products in flight write across this point.
template <int count>
__device__ __forceinline__ void pin(int32_t (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Eight codes a word to the registers of the two k32 steps, bytes of 16 times a code.
__device__ __forceinline__ void widen(uint32_t (&a)[2][4], const uint32_t (&word)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        a[0][j] = word[j] << 4 & 0xf0f0f0f0u;
        a[1][j] = word[j] & 0xf0f0f0f0u;
    }
}

template <class T, int act_bits, class Tile>
struct Consumer {
    using Plan = sm90a::Plan<act_bits, Tile>;
    static constexpr int kRowBlocks = Tile::kRowBlocks;
    static constexpr int kPartTokens = Tile::kTokens > 64 ? 64 : Tile::kTokens;
    static constexpr int kHalves = Tile::kTokens / kPartTokens;
    static constexpr int kParts = kRowBlocks * kHalves;  // of a group
    static constexpr int kBuffers = kPartTokens <= 16 ? 8 : kPartTokens <= 32 ? 6 : 3;
    static constexpr int kAhead = kBuffers - 1;  // parts issued before the oldest is waited for
    static constexpr int kWeightSets =
        (kAhead + kParts - 1) / kParts + 1;  // groups whose widened weights products may still read

    // acc[row block][8 * (token / 16) + 4 * (n8 tile) + 2 * (row g or g + 8) + token % 2]
    using Accumulators = float[kRowBlocks][Tile::kTokens / 2];

    const GemmLoraUpParams& p;
    const Problem<Tile> problem;
    Ring<Plan> ring;
    uint32_t slices;  // address of this warpgroup's two
    int slice = 0;    // which of them comes next

    static __device__ __forceinline__ int warpgroup() { return threadIdx.x / 128 - 1; }
    static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }
    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / kWarp; }

    __device__ __forceinline__ uint32_t block_address(uint32_t stage, int row_block, int group) const {
        return stage + Plan::kWeights + ((warpgroup() * kRowBlocks + row_block) * 2 + group) * kBlockBytes;
    }

    __device__ __forceinline__ void release(uint32_t stage) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(stage + Plan::kEmpty);
    }

    // acc += sums of one part, `w_scale` being those of rows g and g + 8. One rounding a group: the product of a sum
    // (13 bits) and an FP16 scale is exact in FP32.
    __device__ __forceinline__ void accumulate(const int32_t (&sums)[kPartTokens / 2], float* acc,
                                               uint32_t token_scales, float2 w_scale) const {
#pragma unroll
        for (int j = 0; j < kPartTokens / 16; ++j) {
            float a_scale[4];
            if constexpr (act_bits == 4) ptx::ld_shared_v4_f32(a_scale, token_scales + j * 128);
#pragma unroll
            for (int token = 0; token < 4; ++token) {
                const int i = 8 * j + 4 * (token / 2) + token % 2;
                float low = __int2float_rn(sums[i]), high = __int2float_rn(sums[i + 2]);
                if constexpr (act_bits == 4) {
                    low = __fmul_rn(low, a_scale[token]);
                    high = __fmul_rn(high, a_scale[token]);
                }
                acc[i] = __fmaf_rn(low, w_scale.x, acc[i]);
                acc[i + 2] = __fmaf_rn(high, w_scale.y, acc[i + 2]);
            }
        }
    }

    // acc += `groups` groups of K, from the stages that come next in the ring.
    template <int groups>
    __device__ __forceinline__ void chunk(Accumulators& acc) {
        constexpr int kSteps = groups * kParts;
        int32_t sums[kBuffers][kPartTokens / 2];
        uint32_t weights[kWeightSets][kRowBlocks][2][4];
        float2 w_scale[kRowBlocks];
        uint32_t stage[(groups + 1) / 2];
#pragma unroll
        for (int i = 0; i < (groups + 1) / 2; ++i) stage[i] = ring.next_full();

        const auto issue = [&](auto number) {
            constexpr int step = decltype(number)::value;
            constexpr int group = step / kParts, row_block = step % kParts / kHalves, half = step % kHalves;
            uint32_t (&a)[2][4] = weights[group % kWeightSets][row_block];
            if constexpr (half == 0) {
                uint32_t word[4];
                ptx::ld_shared_v4_b32(word, block_address(stage[group / 2], row_block, group % 2) + thread() * 16);
                widen(a, word);
            }
            int32_t (&d)[kPartTokens / 2] = sums[step % kBuffers];
            const uint64_t b = ptx::wgmma_descriptor_128b(stage[group / 2] + Plan::kTokens + group % 2 * kGroup +
                                                          half * kPartTokens * kStageColumns);
            pin(d);
            ptx::wgmma_fence();
            ptx::wgmma_m64k32_s8<kPartTokens>(d, a[0], b, false);
            ptx::wgmma_m64k32_s8<kPartTokens>(d, a[1], b + 32 / 16, true);
            ptx::wgmma_commit();
        };
        const auto finish = [&](auto number) {
            constexpr int step = decltype(number)::value;
            constexpr int group = step / kParts, row_block = step % kParts / kHalves, half = step % kHalves;
            int32_t (&d)[kPartTokens / 2] = sums[step % kBuffers];
            pin(d);
            if constexpr (half == 0) {
                const uint32_t pair = ptx::ld_shared_b32(block_address(stage[group / 2], row_block, group % 2) +
                                                         kBlockCodes + thread() / 4 * 4);
                const float2 scale = Scalar<__half>::unpack(pair);
                w_scale[row_block] = make_float2(scale.x * 0.0625f, scale.y * 0.0625f);  // undoes the 16
            }
            const uint32_t token_scales = stage[group / 2] + Plan::kGroupScales + half * (kPartTokens / 16) * 128 +
                                          group % 2 * 64 + threadIdx.x % 4 * 16;
            accumulate(d, acc[row_block] + half * (kPartTokens / 2), token_scales, w_scale[row_block]);
            if constexpr (step % kParts == kParts - 1 && (group % 2 == 1 || group == groups - 1)) {
                release(stage[group / 2]);
            }
        };
        static_for<(kAhead < kSteps ? kAhead : kSteps)>(issue);
        static_for<kSteps>([&](auto number) {
            constexpr int left = kSteps - 1 - decltype(number)::value;
            if constexpr (left >= kAhead) issue(Number<decltype(number)::value + kAhead>{});
            ptx::wgmma_wait<(left < kAhead ? left : kAhead)>();
            finish(number);
        });
    }

    __device__ __forceinline__ void multiply(Accumulators& acc) {
        int group = 0;
#pragma unroll 1
        for (; group + kChunkGroups <= problem.groups(); group += kChunkGroups) chunk<kChunkGroups>(acc);
#pragma unroll 1
        for (; group + 2 <= problem.groups(); group += 2) chunk<2>(acc);
        if (group < problem.groups()) chunk<1>(acc);
    }

    // 8 bits: acc *= token scale.
    __device__ __forceinline__ void scale_tokens(uint32_t stage, Accumulators& acc) const {
        const Lane lane;
#pragma unroll
        for (int j = 0; j < Tile::kTokens / 16; ++j) {
            float a_scale[4];
            ptx::ld_shared_v4_f32(a_scale, stage + Plan::kTokenScales + j * 64 + lane.t * 16);
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    acc[r][8 * j + i] = __fmul_rn(acc[r][8 * j + i], a_scale[i / 4 * 2 + i % 2]);
                }
            }
        }
    }

    // acc += one step of proj_up * lora_act^T.
    __device__ __forceinline__ void add_low_rank(uint32_t stage, Accumulators& acc) const {
        const Lane lane;
        uint32_t a[kRowBlocks][4];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
            const int m16 = (warpgroup() * kRowBlocks + r) * 4 + warp();
            ptx::ld_shared_v4_b32(a[r], stage + Plan::kProjUp + (m16 * kWarp + lane.index) * 16);
        }
#pragma unroll
        for (int n8 = 0; n8 < Tile::kTokens / 8; ++n8) {
            const uint32_t pair = stage + Plan::kLoraAct + (2 * n8 * kWarp + lane.index) * 4;  // of two core matrices
            const uint32_t b[2] = {ptx::ld_shared_b32(pair), ptx::ld_shared_b32(pair + kWarp * 4)};
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
                ptx::mma_m16n8k16<T>(*reinterpret_cast<float (*)[4]>(&acc[r][4 * n8]), a[r], b);
            }
        }
    }

    __device__ __forceinline__ void add_bias(int first_feature, Accumulators& acc) const {
        if (p.bias == nullptr) return;
        const Lane lane;
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int feature = first_feature + r * 64 + warp() * 16 + high * 8 + lane.g;
                const T* bias = static_cast<const T*>(p.bias) + feature;
                const float value = feature < p.out_features ? Scalar<T>::to_float(*bias) : 0.0f;
#pragma unroll
                for (int i = 0; i < Tile::kTokens / 2; ++i) {
                    if (i / 2 % 2 == high) acc[r][i] = __fadd_rn(acc[r][i], value);
                }
            }
        }
    }

    __device__ __forceinline__ void last_steps(int first_feature, Accumulators& acc) {
        const int steps = last_stages<act_bits>(problem.rank_steps());
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const uint32_t stage = ring.next_full();
            if (act_bits == 8 && step == 0) scale_tokens(stage, acc);
            if (problem.rank_steps() > 0) add_low_rank(stage, acc);
            release(stage);
        }
        add_bias(first_feature, acc);
    }

    // Sixteen tokens at a time through shared memory, [token][feature], for whole 16-byte words of a row. Features are
    // swizzled by the lane that holds the token, so that the 32 lanes of a store hit 32 banks.
    template <class Policy>
    __device__ __forceinline__ void store(int64_t first_token, int first_feature, const Accumulators& acc) {
        constexpr int kFeatures = kRowBlocks * 64, kChunks = kFeatures / 8;
        const Lane lane;
#pragma unroll
        for (int j = 0; j < Tile::kTokens / 16; ++j) {
            const uint32_t buffer = slices + slice * Plan::kSliceBytes;
            slice ^= 1;
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int token = lane.t * 4 + i / 4 * 2 + i % 2;
                    const int feature = r * 64 + warp() * 16 + i / 2 % 2 * 8 + lane.g;
                    ptx::st_shared_f32(buffer + (token * kFeatures + (feature ^ lane.t * 8)) * 4, acc[r][8 * j + i]);
                }
            }
            ptx::bar_sync(1 + warpgroup(), 128);  // and the slice before is free: each thread has read it before this
#pragma unroll
            for (int i = thread(); i < 16 * kChunks; i += 128) {
                const int token = i / kChunks, chunk = i % kChunks * 8;
                const uint32_t from = buffer + (token * kFeatures + (chunk ^ token / 4 * 8)) * 4;
                float v[8];
                ptx::ld_shared_v4_f32(*reinterpret_cast<float (*)[4]>(v), from);
                ptx::ld_shared_v4_f32(*reinterpret_cast<float (*)[4]>(v + 4), from + 16);
                const int64_t row = first_token + 16 * j + token;
                const int column = first_feature + chunk;
                Policy::template apply<T>(p, row, column, row < p.rows && column < p.out_features, v);
            }
        }
    }

    template <class Policy>
    __device__ __forceinline__ void run() {
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            const int first_feature = problem.first_feature(tile) + warpgroup() * kRowBlocks * 64;
            Accumulators acc;
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < Tile::kTokens / 2; ++i) acc[r][i] = 0.0f;
            }
            multiply(acc);
            last_steps(first_feature, acc);
            store<Policy>(problem.first_token(tile), first_feature, acc);
        }
    }
};

}  // namespace omniw4::gemm::sm90a
