// A consumer warpgroup of the GEMM with integer group scales: 64 features (or 128) of the tile by all its tokens, and
// every kSplits-th stage of K.
//
// The small integer of a group is multiplied into the weights while they widen, so the sums stay int32 over all of K:
// nothing is scaled before the end, and nothing depends on the order of K. One stage's products are under way while the
// next one's weights widen into the other half of the registers.
#pragma once

#include "../ptx/wgmma.cuh"
#include "integer_pipeline_sm90a.cuh"
#include "output_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

// Four codes u = q + 8 in the low nibbles of a word to four bytes q * m: u * m + 128 - 8 m is at least 0 and at most 255
// for m up to 16, so no byte carries into the next, and flipping its highest bit subtracts the 128.
__device__ __forceinline__ uint32_t times(uint32_t nibbles, uint32_t scale, uint32_t offset) {
    return ((nibbles & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
}

template <class T, class Tile>
struct Consumer {
    using Plan = integer::Plan<Tile>;
    static constexpr int kRowBlocks = Tile::kRowBlocks;
    using Output = sm90a::Output<T, kRowBlocks, Tile::kTokens>;
    using Sums = int32_t[kRowBlocks][Tile::kTokens / 2];
    static constexpr int kUnit = Tile::kUnit;
    using Weights = uint32_t[kRowBlocks][kUnit][2][4];  // [row block][group][k32 step]: operand A

    const GemmLoraUpParams& p;
    const Problem<Tile> problem;
    Ring<Plan> ring;
    Output output;
    uint32_t handover;  // where splits leave their sums

    static constexpr int kSplits = Tile::kSplits;
    static __device__ __forceinline__ int row_group() { return threadIdx.x / 128 / kSplits; }
    static __device__ __forceinline__ int split() { return threadIdx.x / 128 % kSplits; }
    static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }

    __device__ __forceinline__ void release(uint32_t stage) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(stage + Plan::kEmpty);
    }

    // Goes past stages that are other splits'. Who only counted them could be a whole round of the ring ahead, and take
    // the end of one round for that of the next: a barrier tells no more than a parity.
    __device__ __forceinline__ void pass(int count) {
        for (; count > 0; --count) release(ring.next_full());
    }

    __device__ __forceinline__ void widen(uint32_t stage, int first_group, Weights& a) const {
        const uint32_t blocks = stage + Plan::kWeights + (row_group() * kRowBlocks * 2 + first_group) * kBlockBytes;
        uint32_t word[kRowBlocks][kUnit][4], scales[kRowBlocks][kUnit];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int group = 0; group < kUnit; ++group) {
                const uint32_t block = blocks + (r * 2 + group) * kBlockBytes;
                ptx::ld_shared_v4_b32(word[r][group], block + thread() * 16);
                scales[r][group] = ptx::ld_shared_u16(block + kBlockCodes + thread() / 4 * 2);
            }
        }
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int group = 0; group < kUnit; ++group) {
                const uint32_t scale[2] = {scales[r][group] & 0xff, scales[r][group] >> 8};  // rows g, g + 8
                const uint32_t offset[2] = {0x80808080u - scale[0] * 0x08080808u, 0x80808080u - scale[1] * 0x08080808u};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    a[r][group][0][j] = times(word[r][group][j], scale[j % 2], offset[j % 2]);
                    a[r][group][1][j] = times(word[r][group][j] >> 4, scale[j % 2], offset[j % 2]);
                }
            }
        }
    }

    // sums += kUnit groups of a stage. Where K ends in the middle of it, the tokens of the second group are zeros.
    __device__ __forceinline__ void issue(uint32_t stage, int first_group, Weights& a, Sums& sums) const {
        widen(stage, first_group, a);
        const uint64_t b = ptx::wgmma_descriptor_128b(stage + Plan::kTokens + first_group * kGroup);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2 * kUnit; ++step) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
                ptx::wgmma_m64k32_s8<Tile::kTokens>(sums[r], a[r][step / 2][step % 2], b + step * 2, true);
            }
        }
        ptx::wgmma_commit();
    }

    // Keeps the compiler from moving other uses of the sums across this point, into the time of their products.
    static __device__ __forceinline__ void pin(Sums& sums) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int i = 0; i < Tile::kTokens / 2; ++i) asm volatile("" : "+r"(sums[r][i])::"memory");
        }
    }

    __device__ __forceinline__ void multiply(Sums& sums) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int i = 0; i < Tile::kTokens / 2; ++i) sums[r][i] = 0;
        }
        pin(sums);
        const int stages = problem.stages();
        int left = (stages - split() + kSplits - 1) / kSplits;  // of this warpgroup's
        if (left <= 0) {
            pass(stages);
            return;
        }
        const int behind = (stages - split() - 1) % kSplits;  // stages after its last
        Weights even, odd;
        pass(split());
        uint32_t current = ring.next_full();
        --left;
        issue(current, 0, even, sums);
        const auto next_stage = [&] {
            pass(kSplits - 1);
            return ring.next_full();
        };
        if constexpr (kUnit == 2) {
            const auto next = [&](Weights& a) {
                const uint32_t stage = next_stage();
                issue(stage, 0, a, sums);
                ptx::wgmma_wait<1>();
                release(current);
                current = stage;
            };
#pragma unroll 1
            for (; left >= 2; left -= 2) {
                next(odd);
                next(even);
            }
            if (left > 0) next(odd);
        } else {
            issue(current, 1, odd, sums);
#pragma unroll 1
            for (; left > 0; --left) {
                const uint32_t stage = next_stage();
                ptx::wgmma_wait<1>();
                issue(stage, 0, even, sums);
                ptx::wgmma_wait<1>();
                release(current);
                issue(stage, 1, odd, sums);
                current = stage;
            }
        }
        ptx::wgmma_wait<0>();
        pin(sums);
        release(current);
        pass(behind);
    }

    // Adds the splits' sums, exactly, in those of the first; the others' are of no use after this.
    __device__ __forceinline__ void add_splits(Sums& sums) const {
        if constexpr (kSplits == 1) return;
        const uint32_t place = handover + row_group() * (kSplits - 1) * Plan::kSumBytes + thread() * 4;
        const auto each = [&](uint32_t from, auto&& f) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < Tile::kTokens / 2; ++i) {
                    f(from + (r * (Tile::kTokens / 2) + i) * 512, sums[r][i]);
                }
            }
        };
        const int barrier = 1 + Tile::kRowGroups + row_group();
        if (split() > 0) {
            each(place + (split() - 1) * Plan::kSumBytes,
                 [](uint32_t to, int32_t& sum) { ptx::st_shared_b32(to, sum); });
        }
        ptx::bar_sync(barrier, kSplits * 128);
        if (split() == 0) {
#pragma unroll
            for (int other = 0; other < kSplits - 1; ++other) {
                each(place + other * Plan::kSumBytes,
                     [](uint32_t from, int32_t& sum) { sum += static_cast<int32_t>(ptx::ld_shared_b32(from)); });
            }
        }
        ptx::bar_sync(barrier, kSplits * 128);
    }

    // acc = sum * row scale * token scale.
    __device__ __forceinline__ void scale(uint32_t stage, const Sums& sums, typename Output::Accumulators& acc) const {
        const Lane lane;
        float row_scale[kRowBlocks][2];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
            const int row = (row_group() * kRowBlocks + r) * 64 + Output::warp() * 16 + lane.g;
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                row_scale[r][high] = ptx::ld_shared_f32(stage + Plan::kRowScales + (row + high * 8) * 4);
            }
        }
#pragma unroll
        for (int j = 0; j < Tile::kTokens / 16; ++j) {
            float token_scale[4];
            ptx::ld_shared_v4_f32(token_scale, stage + Plan::kTokenScales + j * 64 + lane.t * 16);
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float scaled = __fmul_rn(__int2float_rn(sums[r][8 * j + i]), row_scale[r][i / 2 % 2]);
                    acc[r][8 * j + i] = __fmul_rn(scaled, token_scale[i / 4 * 2 + i % 2]);
                }
            }
        }
    }

    __device__ __forceinline__ void add_low_rank(uint32_t stage, int tile_feature,
                                                 typename Output::Accumulators& acc) const {
        const int first = problem.segment(tile_feature), feature = tile_feature + row_group() * kRowBlocks * 64;
        uint32_t lora_act[kRowBlocks];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
            lora_act[r] = stage + Plan::kLoraAct + (problem.segment(feature + r * 64) - first) * Plan::kSegmentBytes;
        }
        const uint32_t proj_up = stage + Plan::kProjUp + row_group() * kRowBlocks * 64 * kLowRankRowBytes;
        Output::add_low_rank(proj_up, lora_act, acc);
    }

    __device__ __forceinline__ void run() {
        for (int tile = blockIdx.x; tile < problem.tiles(); tile += gridDim.x) {
            const int tile_feature = problem.first_feature(tile);
            Sums sums;
            multiply(sums);
            add_splits(sums);
            if (split() > 0) {
                pass(problem.last_stages());
                continue;
            }
            typename Output::Accumulators acc;
            uint32_t stage = ring.next_full();
            scale(stage, sums, acc);
#pragma unroll 1
            for (int step = 0; step < problem.rank_steps(); ++step) {
                if (step > 0) stage = ring.next_full();
                add_low_rank(stage, tile_feature, acc);
                release(stage);
            }
            if (problem.rank_steps() == 0) release(stage);
            const int feature = tile_feature + row_group() * kRowBlocks * 64;
            output.add_bias(feature, acc);
            output.store(problem.first_token(tile), feature, acc);
        }
    }
};

}  // namespace omniw4::gemm::sm90a::integer
