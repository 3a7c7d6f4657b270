// What follows the products of a wgmma_s8 tile: the low-rank branch, the bias, and the way out through shared memory.
#pragma once

#include "../common/epilogue.cuh"
#include "../ptx/bar_sync.cuh"
#include "../ptx/mma_f16.cuh"
#include "../ptx/shared_memory.cuh"

namespace omniw4::gemm::sm90a {

// Of one consumer warpgroup: `row_blocks` times 64 features by `tokens` tokens.
//
// Sixteen tokens of a tile are two n8 tiles, and a lane holds columns 2t, 2t + 1 of both. The quantizer stores tokens
// 4t, 4t + 1 in those columns of the first and 4t + 2, 4t + 3 in those of the second, so a lane's four tokens are
// neighbours.
template <class T, int row_blocks, int tokens>
struct Output {
    static constexpr int kFeatures = row_blocks * 64, kChunks = kFeatures / 8, kSlices = tokens / 16;
    static constexpr int kAhead = kSlices < 4 ? kSlices : 4;  // slices whose residual is on its way

    // acc[row block][8 * (token / 16) + 4 * (n8 tile) + 2 * (row g or g + 8) + token % 2]
    using Accumulators = float[row_blocks][tokens / 2];

    const GemmLoraUpParams& p;
    int barrier;      // a number of this warpgroup's own
    uint32_t slices;  // address of this warpgroup's two
    int slice = 0;    // which of them comes next

    static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }
    static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / kWarp; }

    // acc += one step of proj_up * lora_act^T; `proj_up` is this warpgroup's, `lora_act` the address for each row block.
    static __device__ __forceinline__ void add_low_rank(uint32_t proj_up, const uint32_t (&lora_act)[row_blocks],
                                                        Accumulators& acc) {
        const Lane lane;
        uint32_t a[row_blocks][4];
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
            ptx::ld_shared_v4_b32(a[r], proj_up + ((r * 4 + warp()) * kWarp + lane.index) * 16);
        }
#pragma unroll
        for (int n8 = 0; n8 < tokens / 8; ++n8) {
#pragma unroll
            for (int r = 0; r < row_blocks; ++r) {
                const uint32_t pair = lora_act[r] + (2 * n8 * kWarp + lane.index) * 4;  // of two core matrices
                const uint32_t b[2] = {ptx::ld_shared_b32(pair), ptx::ld_shared_b32(pair + kWarp * 4)};
                ptx::mma_m16n8k16<T>(*reinterpret_cast<float (*)[4]>(&acc[r][4 * n8]), a[r], b);
            }
        }
    }

    __device__ __forceinline__ void add_bias(int first_feature, Accumulators& acc) const {
        if (p.bias == nullptr) return;
        const Lane lane;
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int feature = first_feature + r * 64 + warp() * 16 + high * 8 + lane.g;
                const T* bias = static_cast<const T*>(p.bias) + feature;
                const float value = feature < p.out_features ? Scalar<T>::to_float(*bias) : 0.0f;
#pragma unroll
                for (int i = 0; i < tokens / 2; ++i) {
                    if (i / 2 % 2 == high) acc[r][i] = __fadd_rn(acc[r][i], value);
                }
            }
        }
    }

    // Token and column of chunk i of a slice that this thread carries out.
    struct Place {
        int64_t row;
        int token, chunk, column;
        bool inside;
    };
    __device__ __forceinline__ Place place(int64_t first_token, int first_feature, int j, int i) const {
        Place at;
        at.token = (thread() + i * 128) / kChunks;
        at.chunk = (thread() + i * 128) % kChunks * 8;
        at.row = first_token + 16 * j + at.token;
        at.column = first_feature + at.chunk;
        at.inside = at.row < p.rows && at.column < p.out_features;
        return at;
    }

    // The branch is out here so that a launch runs through one epilogue's instructions, without gaps.
    __device__ __forceinline__ void store(int64_t first_token, int first_feature, const Accumulators& acc) {
        switch (p.epilogue) {
            case Epilogue::kResidual: return store_as<Epilogue::kResidual>(first_token, first_feature, acc);
            case Epilogue::kSwiglu: return store_as<Epilogue::kSwiglu>(first_token, first_feature, acc);
            default: return store_as<Epilogue::kPlain>(first_token, first_feature, acc);
        }
    }

    // Sixteen tokens at a time through shared memory, [token][feature], for whole 16-byte words of a row. Features are
    // swizzled by the lane that holds the token, so that the 32 lanes of a store hit 32 banks.
    template <Epilogue kind>
    __device__ __forceinline__ void store_as(int64_t first_token, int first_feature, const Accumulators& acc) {
        constexpr bool kResidual = kind == Epilogue::kResidual;
        const Lane lane;
        uint4 residual[kResidual ? kAhead : 1][row_blocks];
        const auto fetch = [&](int j) {
            if constexpr (kResidual) {
#pragma unroll
                for (int i = 0; i < row_blocks; ++i) {
                    const Place at = place(first_token, first_feature, j, i);
                    const T* from = static_cast<const T*>(p.residual) + at.row * p.out_features + at.column;
                    residual[j % kAhead][i] =
                        at.inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
                }
            }
        };
#pragma unroll
        for (int j = 0; j < kAhead; ++j) fetch(j);
#pragma unroll
        for (int j = 0; j < kSlices; ++j) {
            const uint32_t buffer = slices + slice * (16 * kFeatures * 4);
            slice ^= 1;
#pragma unroll
            for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const int token = lane.t * 4 + i / 4 * 2 + i % 2;
                    const int feature = r * 64 + warp() * 16 + i / 2 % 2 * 8 + lane.g;
                    ptx::st_shared_f32(buffer + (token * kFeatures + (feature ^ lane.t * 8)) * 4, acc[r][8 * j + i]);
                }
            }
            ptx::bar_sync(barrier, 128);  // and the slice before is free: each thread has read it before this
#pragma unroll
            for (int i = 0; i < row_blocks; ++i) {
                const Place at = place(first_token, first_feature, j, i);
                const uint32_t from = buffer + (at.token * kFeatures + (at.chunk ^ at.token / 4 * 8)) * 4;
                float v[8];
                ptx::ld_shared_v4_f32(*reinterpret_cast<float (*)[4]>(v), from);
                ptx::ld_shared_v4_f32(*reinterpret_cast<float (*)[4]>(v + 4), from + 16);
                if constexpr (kResidual) epilogue::add8<T>(v, residual[j % kAhead][i]);
                if constexpr (kind == Epilogue::kSwiglu) {
                    epilogue::Swiglu::apply<T>(p, at.row, at.column, at.inside, v);
                } else {
                    epilogue::Plain::apply<T>(p, at.row, at.column, at.inside, v);
                }
            }
            if (j + kAhead < kSlices) fetch(j + kAhead);
        }
    }
};

}  // namespace omniw4::gemm::sm90a
