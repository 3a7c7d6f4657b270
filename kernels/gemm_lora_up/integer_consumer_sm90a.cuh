// A consumer warpgroup of the GEMM with integer group scales: 64 features (or 128) of the tile by all its tokens, and
// every kSplits-th of the block's stages of K.
//
// The small integer of a group is multiplied into the weights while they widen, so the sums stay int32 over all of K:
// nothing is scaled before the end, and nothing depends on the order of K. One stage's weights widen between the products
// of the stage before, into the other half of the registers.
#pragma once

#include "../ptx/settle.cuh"
#include "../ptx/wgmma.cuh"
#include "integer_output_sm90a.cuh"
#include "integer_pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

// Four codes u = q + 8 in the low nibbles of a word to four bytes q * m: u * m + 128 - 8 m is at least 0 and at most 255
// for m up to 16, so no byte carries into the next, and flipping its highest bit subtracts the 128.
__device__ __forceinline__ uint32_t times(uint32_t nibbles, uint32_t scale, uint32_t offset) {
    return ((nibbles & 0x0f0f0f0fu) * scale + offset) ^ 0x80808080u;
}

template <class T, class Tile>
struct Consumer {
    using Plan = integer::Plan<Tile>;
    using Output = integer::Output<T, Tile>;
    static constexpr int kRowBlocks = Tile::kRowBlocks, kSplits = Tile::kSplits, kUnit = Tile::kUnit;
    using Sums = int32_t[kRowBlocks][Tile::kTokens / 2];
    using SharedSums = int32_t[kRowBlocks][4 * Plan::kSharedUnits];  // of the units that a split adds up
    using Weights = uint32_t[kRowBlocks][kUnit][2][4];               // [row block][group][k32 step]: operand A

    const GemmLoraUpParams& p;
    const Problem<Tile> problem;
    Ring<Plan> ring;

    static __device__ __forceinline__ int row_group() { return threadIdx.x / 128 / kSplits; }
    static __device__ __forceinline__ int split() { return threadIdx.x / 128 % kSplits; }
    static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }

    // This split's own stage: it counts for all of them.
    __device__ __forceinline__ void release(int at) const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(ring.empty(at), kSplits);
    }

    // kUnit groups of a stage's weights, as they lie there.
    struct Narrow {
        uint32_t word[kRowBlocks][kUnit][4], scales[kRowBlocks][kUnit];
    };
    __device__ __forceinline__ void load(int at, int first_group, Narrow& narrow) const {
        const uint32_t blocks =
            ring.stage(at) + Plan::kWeights + (row_group() * kRowBlocks * 2 + first_group) * kBlockBytes;
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int group = 0; group < kUnit; ++group) {
                const uint32_t block = blocks + (r * 2 + group) * kBlockBytes;
                ptx::ld_shared_v4_b32(narrow.word[r][group], block + thread() * 16);
                narrow.scales[r][group] = ptx::ld_shared_u16(block + kBlockCodes + thread() / 4 * 2);
            }
        }
    }
    static __device__ __forceinline__ void widen(const Narrow& narrow, int group, Weights& a) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
            const uint32_t scales = narrow.scales[r][group];
            const uint32_t scale[2] = {scales & 0xff, scales >> 8};  // rows g, g + 8
            const uint32_t offset[2] = {0x80808080u - scale[0] * 0x08080808u, 0x80808080u - scale[1] * 0x08080808u};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t word = narrow.word[r][group][j];
                a[r][group][0][j] = times(word, scale[j % 2], offset[j % 2]);
                a[r][group][1][j] = times(word >> 4, scale[j % 2], offset[j % 2]);
            }
        }
    }

    // One k32 step of kUnit groups; b: descriptor of their tokens. Where K ends in the middle of a stage, the tokens of
    // the second group are zeros.
    static __device__ __forceinline__ void product(int step, const Weights& a, uint64_t b, Sums& sums) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
            ptx::wgmma_m64k32_s8<Tile::kTokens>(sums[r], a[r][step / 2][step % 2], b + step * 2, true);
        }
    }

    // sums += kUnit groups of a stage, widened in `a`; while tensor cores are at it, those that come next widen into
    // `ahead`: a group before each of the later steps. `done` is called when all products before these are over; next()
    // gives stage and first group of what comes next, and may wait for it.
    template <bool more, class Done, class Next>
    __device__ __forceinline__ void advance(int at, int first_group, const Weights& a, Weights& ahead, Sums& sums,
                                            Done&& done, Next&& next) {
        const uint64_t b = ptx::wgmma_descriptor_128b(ring.stage(at) + Plan::kTokens + first_group * kGroup);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kUnit; ++step) product(step, a, b, sums);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        done();
        Narrow narrow;
        if constexpr (more) next(narrow);
#pragma unroll
        for (int step = 0; step < kUnit; ++step) {
            if constexpr (more) widen(narrow, step, ahead);
            ptx::wgmma_fence();
            product(kUnit + step, a, b, sums);
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

    // `before_last` is called while the last product is under way.
    template <class F>
    __device__ __forceinline__ void multiply(Sums& sums, F&& before_last) {
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int i = 0; i < Tile::kTokens / 2; ++i) sums[r][i] = 0;
        }
        pin(sums);
        uint32_t stages = problem.stages();
        ptx::settle(
            stages);  // or what follows from it is worked out before the first tile, and held through all of them
        int left = (static_cast<int>(stages) - split() + kSplits - 1) / kSplits;  // of this warpgroup's
        const bool last_is_empty = kSplits > 1 && left < (static_cast<int>(stages) + kSplits - 1) / kSplits;
        if constexpr (kSplits > 1 || Tile::kClusters) {
            if (left <= 0) {
                before_last();
                if (!Tile::kClusters || last_is_empty) release(ring.next_full(split()));
                return;
            }
        }
        Weights even, odd;
        int current = ring.next_full(split()), previous = -1;
        --left;
        Narrow first;
        load(current, 0, first);
#pragma unroll
        for (int group = 0; group < kUnit; ++group) widen(first, group, even);
        const auto release_previous = [&] {
            if (previous >= 0) release(previous);
            previous = current;
        };
        const auto load_next = [&](Narrow& narrow) {
            current = ring.next_full(split());
            load(current, 0, narrow);
        };
        if constexpr (kUnit == 2) {
#pragma unroll 1
            for (; left >= 2; left -= 2) {
                advance<true>(current, 0, even, odd, sums, release_previous, load_next);
                advance<true>(current, 0, odd, even, sums, release_previous, load_next);
            }
            if (left > 0) {
                advance<true>(current, 0, even, odd, sums, release_previous, load_next);
                advance<false>(current, 0, odd, even, sums, release_previous, load_next);
            } else {
                advance<false>(current, 0, even, odd, sums, release_previous, load_next);
            }
        } else {
            const auto load_second = [&](Narrow& narrow) { load(current, 1, narrow); };
            const auto nothing = [] {};
#pragma unroll 1
            while (true) {
                advance<true>(current, 0, even, odd, sums, release_previous, load_second);
                if (--left < 0) break;
                advance<true>(current, 1, odd, even, sums, nothing, load_next);
            }
            advance<false>(current, 1, odd, even, sums, nothing, load_next);
        }
        before_last();
        ptx::wgmma_wait<0>();
        pin(sums);
        release(current);
        if (last_is_empty) release(ring.next_full(split()));
    }

    // Of the sums over the block's part of K, exact in any order, each split keeps those of its units: of every block
    // that finishes tokens, as many.
    __device__ __forceinline__ void share(const Sums& sums, SharedSums& mine) const {
        if constexpr (kSplits == 1) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < Tile::kTokens / 2; ++i) mine[r][i] = sums[r][i];
            }
        } else {
            static_assert(kRowBlocks == 1);
            constexpr int kUnits = Plan::kSharedUnits;
            const uint32_t groups = ring.base + Plan::kSums + row_group() * Plan::kReceivers * Plan::kSumBytes;
            const auto place = [&](int receiver, int turn, int unit) {
                return groups + receiver * Plan::kSumBytes + (turn * kUnits + unit) * Plan::kUnitBytes + thread() * 16;
            };
#pragma unroll
            for (int receiver = 0; receiver < Plan::kReceivers; ++receiver) {
                const int turn = (split() - receiver + kSplits) % kSplits - 1;  // -1: its own
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) {
                    const int of_block = unit / Plan::kUnits * Plan::kAllUnits, within = unit % Plan::kUnits;
                    const int32_t* sum = &sums[0][(of_block + receiver * Plan::kUnits + within) * 4];
                    if (turn >= 0) {
                        ptx::st_shared_v4_b32(place(receiver, turn, unit),
                                              make_uint4(static_cast<uint32_t>(sum[0]), static_cast<uint32_t>(sum[1]),
                                                         static_cast<uint32_t>(sum[2]), static_cast<uint32_t>(sum[3])));
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (receiver == 0 || turn < 0) mine[0][unit * 4 + i] = sum[i];
                    }
                }
            }
            ptx::bar_sync(1 + row_group(), kSplits * 128);
            if (split() >= Plan::kReceivers) return;
#pragma unroll
            for (int turn = 0; turn < kSplits - 1; ++turn) {
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) {
                    uint32_t more[4];
                    ptx::ld_shared_v4_b32(more, place(split(), turn, unit));
#pragma unroll
                    for (int i = 0; i < 4; ++i) mine[0][unit * 4 + i] += static_cast<int32_t>(more[i]);
                }
            }
        }
    }

    // The sums of other blocks' tokens go there, to the split of the same number, and those of this block's tokens come
    // from all parts of K.
    __device__ __forceinline__ void exchange(const SharedSums& sums, typename Output::Sums& mine) const {
        constexpr int kUnits = Plan::kUnits;
        ptx::cluster_wait();  // for the others' barriers
        if (split() >= Plan::kReceivers) return;
        const int receiver = row_group() * Plan::kReceivers + split(), warpgroup = threadIdx.x / 128;
        const auto offset = [&](int turn, int r, int unit) {
            return ((turn * kRowBlocks + r) * kUnits + unit) * Plan::kUnitBytes + thread() * 16;
        };
#pragma unroll
        for (int to = 0; to < Tile::kFinishers; ++to) {
            const int turn = (problem.part() - to + Tile::kCluster) % Tile::kCluster - 1;  // -1: its own
            const uint32_t parts = ptx::map_shared(ring.parts(receiver), to);
            const uint32_t barrier = ptx::map_shared(ring.part_barrier(warpgroup), to);
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) {
                    const int32_t* sum = &sums[r][(to * kUnits + unit) * 4];
                    if (turn >= 0) {
                        ptx::st_async_v4(parts + offset(turn, r, unit),
                                         make_uint4(static_cast<uint32_t>(sum[0]), static_cast<uint32_t>(sum[1]),
                                                    static_cast<uint32_t>(sum[2]), static_cast<uint32_t>(sum[3])),
                                         barrier);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (to == 0 || turn < 0) mine[r][unit * 4 + i] = sum[i];
                    }
                }
            }
        }
        if (!problem.finishes()) return;
        ptx::mbarrier_wait(ring.part_barrier(warpgroup), 0);
#pragma unroll
        for (int turn = 0; turn < Tile::kCluster - 1; ++turn) {
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit) {
                    uint32_t more[4];
                    ptx::ld_shared_v4_b32(more, ring.parts(receiver) + offset(turn, r, unit));
#pragma unroll
                    for (int i = 0; i < 4; ++i) mine[r][unit * 4 + i] += static_cast<int32_t>(more[i]);
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        for (int tile = problem.first_tile(); tile < problem.tiles(); tile += gridDim.x) {
            Output output{p, problem, problem.own_token(tile), problem.first_feature(tile)};
            const bool finishes = problem.finishes();
            Sums sums;
            multiply(sums, [&] {
                if constexpr (Output::kFetchEarly) {
                    if (finishes) output.fetch();
                }
            });
            if constexpr (!Output::kFetchEarly) {
                if (finishes) output.fetch();
            }
            SharedSums shared;
            share(sums, shared);
            if constexpr (Tile::kClusters) {
                typename Output::Sums mine;
                exchange(shared, mine);
                if (finishes) output.run(ring, mine, true);
                break;
            } else {
                output.run(ring, shared, tile + static_cast<int>(gridDim.x) >= problem.tiles());
                while (!ring.between_rounds()) Output::release(ring, ring.next_full());
            }
        }
    }
};

}  // namespace omniw4::gemm::sm90a::integer
