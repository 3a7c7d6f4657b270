// The warp that feeds a block: boxes of queries, keys and values, straight from the rows of qkv. Lane 0 asks for them.
#pragma once

#include "../ptx/fence_proxy.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/shared_memory.cuh"
#include "../ptx/tensor_copy.cuh"
#include "pipeline_sm90a.cuh"

namespace omniw4::attention {

constexpr int kBoxRows = 64;  // that one copy brings

template <int head_dim, int key_tile>
struct Producer {
    using Plan = attention::Plan<head_dim, key_tile>;
    using Place = attention::Place<Plan::kStages>;
    static_assert(key_tile % kBoxRows == 0 && kUnitRows % kBoxRows == 0);

    const AttentionVarlenParams& p;
    const void* map;
    uint32_t base;
    Place place{};
    uint32_t works = 0, tails = 0;

    // `rows` rows from `row` on, one head wide, as panels of that many rows.
    template <int rows>
    __device__ __forceinline__ void copy(uint32_t to, int row, int head, uint32_t barrier) const {
#pragma unroll
        for (int panel = 0; panel < Plan::kPanels; ++panel) {
#pragma unroll
            for (int box = 0; box < rows; box += kBoxRows) {
                ptx::tensor_copy_2d(to + (panel * rows + box) * kRowBytes, map, head * head_dim + panel * kPanelColumns,
                                    row + box, barrier);
            }
        }
    }

    __device__ __forceinline__ void copy_queries(const Division& division, const Work& work) const {
        ptx::mbarrier_wait(base + Plan::kQueriesEmpty, works % 2 ^ 1);
        ptx::mbarrier_arrive_expect(base + Plan::kQueriesFull, kWarpgroups * Plan::kQueryBytes);
#pragma unroll
        for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
            const int unit = division.unit(work, warpgroup);
            copy<kUnitRows>(base + Plan::kQueries + warpgroup * Plan::kQueryBytes,
                            work.first_row + division.first_query(unit), division.q_head(work, unit),
                            base + Plan::kQueriesFull);
        }
    }

    __device__ __forceinline__ void copy_tile(uint32_t tiles, uint32_t full, uint32_t empty, int row, int head) const {
        ptx::mbarrier_wait(base + empty + place.stage * 8, place.phase ^ 1);
        const uint32_t barrier = base + full + place.stage * 8;
        ptx::mbarrier_arrive_expect(barrier, Plan::kTileBytes);
        copy<key_tile>(base + tiles + place.stage * Plan::kTileBytes, row, head, barrier);
    }

    // Clears the rows that follow a sequence's last key in its last value tile, up to a multiple of 16, by which products
    // with values go: probabilities past the last key are 0, but what lies there may be infinite or NaN, and 0 times that
    // is NaN.
    __device__ __forceinline__ void clear_tail(const Place& last, int keys) const {
        ptx::mbarrier_wait(base + Plan::kValuesFull + last.stage * 8, last.phase);
        const uint32_t tile = base + Plan::kValues + last.stage * Plan::kTileBytes;
        const int lane = threadIdx.x % kWarp, first = keys % key_tile;
        const int end = static_cast<int>(round_up(first, 16));
        for (int row = first + lane / 8; row < end; row += kWarp / 8) {
#pragma unroll
            for (int panel = 0; panel < Plan::kPanels; ++panel) {
                const uint32_t chunk = panel * Plan::kTilePanelBytes + row * kRowBytes + lane % 8 * 16;
                ptx::st_shared_v4_b32(tile + chunk, make_uint4(0, 0, 0, 0));
            }
        }
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(base + Plan::kTailReady + tails % 2 * 8);
    }

    __device__ __forceinline__ void feed(const Division& division, const Work& work) {
        const bool leader = threadIdx.x % kWarp == 0;
        if (leader) copy_queries(division, work);
        ++works;
        const int keys = division.keys(work), key_head = p.q_heads + work.kv_head, value_head = key_head + p.kv_heads;
        Place last = place;
        for (int key = 0; key < keys; key += key_tile) {
            if (leader) {
                copy_tile(Plan::kKeys, Plan::kKeysFull, Plan::kKeysEmpty, work.first_row + key, key_head);
                copy_tile(Plan::kValues, Plan::kValuesFull, Plan::kValuesEmpty, work.first_row + key, value_head);
            }
            last = place;
            place.step();
        }
        __syncwarp();
        if (keys % 16 != 0) {
            clear_tail(last, keys);
            ++tails;
        }
    }

    // All lanes of one warp. Waits for the kernels before, with or without work, and with it the whole block: the
    // consumers wait for what is copied here.
    __device__ __forceinline__ void run() {
        const Division division{p};
        Work work;
        int index = blockIdx.x;
        bool found = division.find(index, work);
        ptx::pdl_wait();
        while (found) {
            feed(division, work);
            index += gridDim.x;
            found = division.find(index, work);
        }
    }
};

}  // namespace omniw4::attention
