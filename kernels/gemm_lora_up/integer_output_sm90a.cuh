// What follows the products of a tile with integer group scales: scales, the low-rank branch, bias and epilogue, in the
// registers in which the sums are; then the way out, rounded, through stages of the ring: one barrier for the whole tile.
//
// Sixteen tokens of a tile are two units of eight, and a lane holds columns 2t, 2t + 1 of both. The quantizer stores
// tokens 4t, 4t + 1 in those columns of the first and 4t + 2, 4t + 3 in those of the second.
#pragma once

#include "../common/qknorm_rope.cuh"
#include "../common/swiglu.cuh"
#include "../ptx/bar_sync.cuh"
#include "../ptx/fence_proxy.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/shared_memory.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/wgmma.cuh"
#include "../ptx/wgmma_f16.cuh"
#include "integer_pipeline_sm90a.cuh"

namespace omniw4::gemm::sm90a::integer {

// One warpgroup's part of one tile, or of the tokens of one that the block finishes.
template <class T, class Tile>
struct Output {
    using Plan = integer::Plan<Tile>;
    static constexpr int kRowBlocks = Tile::kRowBlocks, kUnits = Plan::kUnits;
    static constexpr int kGroupThreads = Tile::kSplits * 128;  // of a row group
    static constexpr int kConsumers = Tile::kWarpgroups * 128;
    static constexpr int kEveryone = 1 + Tile::kRowGroups;  // barrier of all consumers; those before are row groups'
    // 16-byte words of a row group's part of the tile, a thread
    static constexpr int kWords = (Tile::kOwnTokens * kRowBlocks * 8 + kGroupThreads - 1) / kGroupThreads;
    // A residual is fetched while the last product is under way, or, where that would take too many registers, a few words
    // at a time later.
    static constexpr int kHeldThen = kRowBlocks * (Tile::kTokens / 2 + 16 * Tile::kUnit);  // sums and weights
    static constexpr bool kFetchEarly = 4 * kWords + kHeldThen + 24 <= Tile::kConsumerRegisters;
    static constexpr int kAtOnce = kFetchEarly ? kWords : 4;

    // [row block][4 * unit + 2 * (row g or g + 8) + token % 2]
    using Sums = int32_t[kRowBlocks][4 * kUnits];
    using Accumulators = float[kRowBlocks][4 * kUnits];

    const GemmLoraUpParams& p;
    const Problem<Tile>& problem;
    int64_t first_token;
    int tile_feature;
    // threadIdx.x, as something the compiler knows nothing of: it would work out addresses before the products, and hold
    // them all the while.
    uint32_t thread;
    float bias[kRowBlocks][2];
    uint4 residual[kFetchEarly ? kWords : 1];
    uint32_t out[Plan::kOutStages];  // addresses

    __device__ __forceinline__ int index() const { return thread % kWarp; }
    __device__ __forceinline__ int g() const { return index() / 4; }
    __device__ __forceinline__ int t() const { return thread % 4; }
    __device__ __forceinline__ int warp() const { return thread % 128 / kWarp; }
    __device__ __forceinline__ int split() const { return thread / 128 % Tile::kSplits; }
    __device__ __forceinline__ int row_group() const { return thread / kGroupThreads; }
    __device__ __forceinline__ uint32_t group_thread() const { return thread % kGroupThreads; }
    __device__ __forceinline__ int first_row() const { return row_group() * kRowBlocks * 64; }  // in the tile
    __device__ __forceinline__ int first_unit() const { return split() * kUnits; }
    __device__ __forceinline__ bool has_units() const { return split() < Plan::kReceivers; }

    // The row group's part of the tile as 16-byte words, `words` to a token: this thread's are the same word of every
    // kStep-th token.
    template <int words>
    struct Words {
        static constexpr int kStep = kGroupThreads / words;  // tokens
        static constexpr int kCount = (Tile::kOwnTokens + kStep - 1) / kStep;
        static constexpr bool kWhole = kCount * kStep == Tile::kOwnTokens;  // all of a thread's tokens are in the tile
        uint32_t token, word;                                               // the first
    };
    template <int words>
    __device__ __forceinline__ Words<words> words_of() const {
        return {group_thread() / words, group_thread() % words};
    }
    // Of sixteen tokens 4j + i is row 4i + j, so that the eight that a store of 32 lanes goes to are neighbours.
    static __device__ __forceinline__ int row_of(uint32_t token) { return token % 4 * 4 + token / 4; }

    // Address of token `within` of a slice of sixteen: where the slice is known when compiling, so is its stage.
    __device__ __forceinline__ uint32_t slice_address(int slice, int within) const {
        constexpr int kSlices = Plan::kOutTokens / 16;
        uint32_t address = out[0] + slice * 16 * Plan::kOutPitch;
#pragma unroll
        for (int i = 1; i < Plan::kOutStages; ++i) {
            if (slice >= i * kSlices) address = out[i] + (slice - i * kSlices) * 16 * Plan::kOutPitch;
        }
        return address + row_of(within) * Plan::kOutPitch;
    }
    __device__ __forceinline__ uint32_t token_address(int token) const { return slice_address(token / 16, token % 16); }

    // Address of token i * step + first; first < step.
    template <int step>
    __device__ __forceinline__ uint32_t row_address(int i, int first) const {
        if constexpr (step <= 16) {
            return slice_address(i * step / 16, i * step % 16 + first);
        } else {
            return slice_address(i * (step / 16) + first / 16u, first % 16u);
        }
    }

    // What comes from global memory, asked for before it is needed.
    __device__ __forceinline__ void fetch() {
        thread = threadIdx.x;
        asm volatile("" : "+r"(thread));
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int feature = tile_feature + first_row() + r * 64 + warp() * 16 + high * 8 + g();
                const bool inside = p.bias != nullptr && feature < p.out_features;
                bias[r][high] = inside ? Scalar<T>::to_float(static_cast<const T*>(p.bias)[feature]) : 0.0f;
            }
        }
        if constexpr (kFetchEarly) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                residual[i] = make_uint4(0, 0, 0, 0);  // defined, or a register is held for it all through the products
                if (p.epilogue == Epilogue::kResidual) residual[i] = residual_word(i);
            }
        }
    }
    // Tokens of this tile that there are.
    __device__ __forceinline__ int tokens_left() const {
        return static_cast<int>(min(static_cast<int64_t>(Tile::kOwnTokens), p.rows - first_token));
    }
    __device__ __forceinline__ uint4 residual_word(int i) const {
        using W = Words<kRowBlocks * 8>;
        const W at = words_of<kRowBlocks * 8>();
        const int column = tile_feature + first_row() + at.word * 8, token = i * W::kStep + at.token;
        if (token >= tokens_left() || column >= p.out_features) return make_uint4(0, 0, 0, 0);
        const T* from = static_cast<const T*>(p.residual) + (first_token + at.token) * p.out_features + column;
        return *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(i * W::kStep) * p.out_features);
    }

    __device__ __forceinline__ void run(Ring<Plan>& ring, const Sums& sums, bool last_tile) {
        Accumulators acc;
        int last = ring.next_full();
        scale(ring.stage(last), sums, acc);
#pragma unroll 1
        for (int step = 0; step < problem.rank_steps(); ++step) {
            if (step > 0) last = ring.next_full();
            if (has_units()) add_low_rank(ring.stage(last), acc);
            release(ring, last);
        }
        if (problem.rank_steps() == 0) release(ring, last);
        if (has_units()) add_bias(acc);
#pragma unroll
        for (int i = 0; i < Plan::kOutStages; ++i) out[i] = ring.stage(ring.next_full());
        switch (p.epilogue) {
            case Epilogue::kSwiglu:
                if (has_units()) store_gated(acc);
                if (!last_tile) ptx::fence_proxy_async();  // copies write these stages next
                ptx::bar_sync(kEveryone, kConsumers);
                copy_gated();
                break;
            case Epilogue::kQkNormRope:
                if (has_units()) store(acc);
                if (!last_tile) ptx::fence_proxy_async();  // copies write these stages next
                ptx::bar_sync(kEveryone, kConsumers);
                if (p.heads.head_dim == 64) copy_heads<64>();
                if (p.heads.head_dim == 128) copy_heads<128>();
                break;
            case Epilogue::kResidual: add_residual(acc); [[fallthrough]];
            default:
                if (has_units()) store(acc);
                if (!last_tile) ptx::fence_proxy_async();  // copies write these stages next
                ptx::bar_sync(1 + row_group(), kGroupThreads);
                copy();
        }
#pragma unroll
        for (int i = Plan::kOutStages; i > 0; --i) release(ring, ring.ago(i));
    }

    static __device__ __forceinline__ void release(const Ring<Plan>& ring, int at) {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(ring.empty(at));
    }

    // acc = sum * row scale * token scale.
    __device__ __forceinline__ void scale(uint32_t stage, const Sums& sums, Accumulators& acc) const {
        float row_scale[kRowBlocks][2];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int row = first_row() + r * 64 + warp() * 16 + high * 8 + g();
                row_scale[r][high] = ptx::ld_shared_f32(stage + Plan::kRowScales + row * 4);
            }
        }
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const int unit = first_unit() + i, token = unit / 2 * 16 + t() * 4 + unit % 2 * 2;
            uint32_t pair[2];
            ptx::ld_shared_v2_b32(pair, stage + Plan::kTokenScales + token * 4);
            const float token_scale[2] = {__uint_as_float(pair[0]), __uint_as_float(pair[1])};
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float scaled = __fmul_rn(__int2float_rn(sums[r][4 * i + j]), row_scale[r][j / 2]);
                    acc[r][4 * i + j] = __fmul_rn(scaled, token_scale[j % 2]);
                }
            }
        }
    }

    // acc += one step of proj_up * lora_act^T, in products of as many units as there are left, a power of two.
    __device__ __forceinline__ void add_low_rank(uint32_t stage, Accumulators& acc) const {
        constexpr uint32_t kCoreMatrix = 8 * 16, kUnitBytes = 2 * kCoreMatrix;
        const int first_segment = problem.segment(tile_feature);
        uint32_t a[kRowBlocks][4];
        uint64_t b[kRowBlocks];
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
            const int row = first_row() + r * 64, segment = problem.segment(tile_feature + row) - first_segment;
            ptx::ld_shared_v4_b32(a[r], stage + Plan::kProjUp + ((row / 16 + warp()) * kWarp + index()) * 16);
            const uint32_t lora_act = stage + Plan::kLoraAct + segment * Plan::kSegmentBytes;
            b[r] = ptx::wgmma_core_matrices(lora_act + first_unit() * kUnitBytes, kCoreMatrix, kUnitBytes);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) add_low_rank<0>(a[r], b[r], acc[r]);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
    }
    template <int unit>
    static __device__ __forceinline__ void add_low_rank(const uint32_t (&a)[4], uint64_t b, float (&acc)[4 * kUnits]) {
        constexpr int kLeft = kUnits - unit;
        if constexpr (kLeft > 0) {
            constexpr int kNow = kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : kLeft >= 2 ? 2 : 1;
            ptx::wgmma_m64k16<8 * kNow, T, ptx::Major::kK>(*reinterpret_cast<float (*)[4 * kNow]>(&acc[4 * unit]), a,
                                                           b + unit * 16, true);
            add_low_rank<unit + kNow>(a, b, acc);
        }
    }

    __device__ __forceinline__ void add_bias(Accumulators& acc) const {
        if (p.bias == nullptr) return;
#pragma unroll
        for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
            for (int i = 0; i < 4 * kUnits; ++i) acc[r][i] = __fadd_rn(acc[r][i], bias[r][i / 2 % 2]);
        }
    }

    // Calls f(first unit, second unit, row block, address for this lane) for ldmatrix and stmatrix of four 8x8 matrices:
    // two units, of each features 0..7 and 8..15. Of a unit alone, twice the same.
    template <class F>
    __device__ __forceinline__ void each_pair(F&& f) const {
        const int row = index() % 8, eight = index() / 8 % 2, second = index() / 16;
#pragma unroll
        for (int i = 0; i < kUnits; i += 2) {
            const int other = i + 1 < kUnits ? i + 1 : i;
            int slice = i / 2, half = second;  // where a split begins with a slice, which slice is known when compiling
            if constexpr (kUnits % 2 == 0) {
                slice += first_unit() / 2;
            } else {
                const int unit = first_unit() + (second == 0 ? i : other);
                slice = unit / 2;
                half = unit % 2;
            }
            const uint32_t address = slice_address(slice, row / 2 * 4 + half * 2 + row % 2);
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
                f(i, other, r, address + (first_row() + r * 64 + warp() * 16 + eight * 8) * 2);
            }
        }
    }

    __device__ __forceinline__ void store(const Accumulators& acc) const {
        each_pair([&](int first, int second, int r, uint32_t address) {
            uint32_t d[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* pair = &acc[r][4 * (j < 2 ? first : second) + j % 2 * 2];
                d[j] = Scalar<T>::pack(pair[0], pair[1]);
            }
            ptx::stmatrix_x4_trans(address, d);
        });
    }

    // Through shared memory into the lanes that hold the sums; each warp then overwrites what it alone has read.
    __device__ __forceinline__ void add_residual(Accumulators& acc) const {
        using W = Words<kRowBlocks * 8>;
        const W at = words_of<kRowBlocks * 8>();
        const uint32_t offset = first_row() * 2 + at.word * 16;
#pragma unroll
        for (int first = 0; first < kWords; first += kAtOnce) {
            uint4 word[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce && first + i < kWords; ++i) {
                word[i] = kFetchEarly ? residual[i] : residual_word(first + i);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce && first + i < kWords; ++i) {
                if ((first + i) * W::kStep + at.token >= Tile::kOwnTokens) continue;
                ptx::st_shared_v4_b32(row_address<W::kStep>(first + i, at.token) + offset, word[i]);
            }
        }
        ptx::bar_sync(1 + row_group(), kGroupThreads);
        if (!has_units()) return;
        each_pair([&](int first, int second, int r, uint32_t address) {
            uint32_t d[4];
            ptx::ldmatrix_x4_trans(d, address);
#pragma unroll
            for (int j = 0; j < (second > first ? 4 : 2); ++j) {
                float* pair = &acc[r][4 * (j < 2 ? first : second) + j % 2 * 2];
                const float2 addend = Scalar<T>::unpack(d[j]);
                pair[0] = __fadd_rn(pair[0], addend.x);
                pair[1] = __fadd_rn(pair[1], addend.y);
            }
        });
    }

    __device__ __forceinline__ void copy() const {
        using W = Words<kRowBlocks * 8>;
        const W at = words_of<kRowBlocks * 8>();
        const int column = tile_feature + first_row() + at.word * 8, left = tokens_left();
        const uint32_t offset = first_row() * 2 + at.word * 16;
        if (column >= p.out_features) return;
        T* y = static_cast<T*>(p.y) + (first_token + at.token) * p.out_features + column;
#pragma unroll
        for (int i = 0; i < W::kCount; ++i) {
            const bool there = i * W::kStep + static_cast<int>(at.token) < left;
            uint32_t word[4];
            if (W::kWhole || there) ptx::ld_shared_v4_b32(word, row_address<W::kStep>(i, at.token) + offset);
            if (there) {
                *reinterpret_cast<uint4*>(y) = make_uint4(word[0], word[1], word[2], word[3]);
            }
            y += W::kStep * p.out_features;
        }
    }

    // Rows g and g + 1, g even, are gate and up of a feature: lanes that are neighbours in g share two tokens out.
    __device__ __forceinline__ void store_gated(const Accumulators& acc) const {
        const bool odd = g() % 2 == 1;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            const int unit = first_unit() + i;
            const uint32_t row = slice_address(unit / 2, t() * 4 + unit % 2 * 2 + g() % 2);
#pragma unroll
            for (int r = 0; r < kRowBlocks; ++r) {
                const int feature = (first_row() + r * 64 + warp() * 16) / 2 + g() / 2;
#pragma unroll
                for (int high = 0; high < 2; ++high) {
                    const float first = acc[r][4 * i + 2 * high], second = acc[r][4 * i + 2 * high + 1];
                    const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
                    const float value = swiglu(odd ? other : first, odd ? second : other);
                    ptx::st_shared_b16(row + (feature + high * 4) * 2, Scalar<T>::pack(value, 0.0f));
                }
            }
        }
    }

    // All consumers together, so that what a token gets is one run of memory: 64 bytes of each row group on its own take
    // twice as long.
    __device__ __forceinline__ void copy_gated() const {
        constexpr int kTokenWords = Tile::kFeatures / 16, kStep = kConsumers / kTokenWords;
        constexpr int kCount = (Tile::kOwnTokens + kStep - 1) / kStep;
        static_assert(kConsumers % kTokenWords == 0 && (kStep < 16 || kStep % 16 == 0));
        const uint32_t token = thread / kTokenWords, offset = thread % kTokenWords * 16;
        const int width = p.out_features / 2, left = tokens_left();
        const int column = tile_feature / 2 + static_cast<int>(offset) / 2;
        if (column >= width) return;
        T* const y = static_cast<T*>(p.y) + (first_token + token) * width + column;
        // store(i, word) puts the word of the thread's i-th token. In a loop of its own each, or they end as stores of
        // four bytes.
        const auto each = [&](auto&& store) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const bool there = i * kStep + static_cast<int>(token) < left;
                uint32_t word[4];
                if (kCount * kStep == Tile::kOwnTokens || there) {
                    ptx::ld_shared_v4_b32(word, row_address<kStep>(i, token) + offset);
                }
                if (there) store(y + static_cast<int64_t>(i * kStep) * width, word);
            }
        };
        if (width % 8 == 0) {
            each([](T* to, const uint32_t (&word)[4]) {
                *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
            });
        } else {
            each([&](T* to, const uint32_t (&word)[4]) {
                reinterpret_cast<uint2*>(to)[0] = make_uint2(word[0], word[1]);
                if (column + 4 < width) reinterpret_cast<uint2*>(to)[1] = make_uint2(word[2], word[3]);
            });
        }
    }

    // Heads of query and key go through norm and rotation, the op's own, which start from what the op would read. A lane
    // has the same columns of every kStep-th token.
    template <int kHeadDim>
    __device__ __forceinline__ void copy_heads() const {
        if constexpr (Tile::kFeatures % kHeadDim == 0) {
            constexpr int kLanes = kHeadDim / 8, kHeads = Tile::kFeatures / kHeadDim;
            constexpr int kItems = kConsumers / kLanes, kStep = kItems / kHeads;  // heads that are taken at once
            constexpr int kBatch = Tile::kConsumerRegisters < 112 ? 1 : Tile::kConsumerRegisters < 200 ? 2 : 4;
            static_assert(kItems % kHeads == 0);
            const int item = thread / kLanes, i = thread % kLanes, token = item / kHeads, left = tokens_left();
            const int column = tile_feature + item % kHeads * kHeadDim + i * 8, head = column / kHeadDim;
            const int rotated_heads = p.heads.q_heads + p.heads.kv_heads;
            if (tile_feature / kHeadDim >= rotated_heads) return copy();
            const void* weights = head < p.heads.q_heads ? p.heads.q_weight : p.heads.k_weight;
            const bool normed = weights != nullptr;
            uint4 weight = make_uint4(0, 0, 0, 0);
            if (normed) weight = static_cast<const uint4*>(weights)[i];
            T* y = static_cast<T*>(p.y) + (first_token + token) * p.out_features + column;
            const int64_t* positions = p.heads.positions + first_token + token;
#pragma unroll 1
            for (int first = 0; first < Tile::kOwnTokens; first += kBatch * kStep) {
                Rotation rotation[kBatch];
                uint4 x[kBatch];
                float squares[kBatch];
                const auto there = [&](int j) { return first + j * kStep + token < left; };
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    rotation[j].position = 0;
                    if (there(j)) rotation[j].position = positions[first + j * kStep];
                }
#pragma unroll
                for (int j = 0; j < kBatch; ++j) rotation[j].template load<kHeadDim>(p.heads);
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    uint32_t word[4];
                    const uint32_t row = token_address(there(j) ? first + j * kStep + token : 0);
                    ptx::ld_shared_v4_b32(word, row + (column - tile_feature) * 2);
                    x[j] = make_uint4(word[0], word[1], word[2], word[3]);
                    squares[j] = head_squares<T>(x[j], kLanes);
                }
                // One lane's work for each of the batch, not every lane's for all.
                const int turn = i % kBatch;
                float mine = squares[0];
#pragma unroll
                for (int j = 1; j < kBatch; ++j) mine = turn == j ? squares[j] : mine;
                mine = head_inv_rms(mine, kHeadDim, p.heads.eps);
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    const float inv_rms = __shfl_sync(0xffffffffu, mine, thread % kWarp / kBatch * kBatch + j);
                    uint4 result = x[j];
                    if (normed) result = norm_head<T>(result, inv_rms, weight);
                    result = rotate_head<T>(rotation[j], result, kLanes);
                    if (there(j) && column < p.out_features) {
                        *reinterpret_cast<uint4*>(y) = head < rotated_heads ? result : x[j];
                    }
                    y += kStep * p.out_features;
                }
            }
        }
    }
};

}  // namespace omniw4::gemm::sm90a::integer
