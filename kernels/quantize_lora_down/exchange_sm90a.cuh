// What the blocks of a cluster tell each other: squares, absmax, low-rank sums, and proj_down on its way to one of them.
//
// Messages are 16-byte asynchronous stores, and every block knows how many it will get: an mbarrier counts their bytes.
// Where a cluster takes several row tiles, each kind has two places and two barriers, used in turn. Nobody sends for tile
// i + 2 before all blocks have sent for tile i + 1, which they do when they are done with what tile i brought them; so two
// are enough, and thread 0 announces the bytes of tile i + 2 as soon as those of tile i are there.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/shared_memory.cuh"
#include "cut_sm90a.cuh"

namespace omniw4::quantize::sm90a {

enum class Message { kSquares, kAbsmax, kSums };

constexpr int kBarriers = 0, kBarrierBytes = 64;            // of the weights, then two for each kind of message
constexpr int kBlockAbsmax = kBarrierBytes;                 // [2][16 rows], as bits: largest of this block so far
constexpr int kVariable = kBlockAbsmax + 2 * kRowTile * 4;  // where Places begins

template <bool kLoops>
struct Exchange {
    const Plan& plan;
    uint32_t base;
    int rank;

    __device__ __forceinline__ uint32_t barrier(Message message, int turn) const {
        return base + kBarriers + 8 * (1 + 2 * static_cast<int>(message) + turn);
    }

    __device__ __forceinline__ void announce(Message message, int turn, int bytes) const {
        ptx::mbarrier_arrive_expect(barrier(message, turn), static_cast<uint32_t>(bytes));
    }

    // Thread 0, first thing. bytes(message): what comes for each row tile.
    template <class F>
    __device__ __forceinline__ void begin(F&& bytes, bool several) const {
#pragma unroll
        for (int i = 0; i < 7; ++i) {
            if (kLoops || i == 0 || i % 2 == 1) ptx::mbarrier_init(base + kBarriers + 8 * i, 1);
        }
        ptx::mbarrier_init_fence();
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const auto message = static_cast<Message>(i);
            announce(message, 0, bytes(message));
            if (several) announce(message, 1, bytes(message));
        }
    }

    __device__ __forceinline__ void send(int to, Message message, int turn, int place, const float4& value) const {
        ptx::st_async_v4(ptx::map_shared(base + place, to), value, ptx::map_shared(barrier(message, turn), to));
    }

    // Every thread that reads what has come, and thread 0. again: there is a row tile that takes the same turn next.
    template <class F>
    __device__ __forceinline__ void wait(Message message, int iteration, F&& bytes, bool again) const {
        ptx::mbarrier_wait(barrier(message, iteration % 2), iteration / 2 % 2);
        if (again && threadIdx.x == 0) announce(message, iteration % 2, bytes(message));
    }
};

// Copies what this block needs of proj_down, norm weights and reciprocals of smooth; called by one warp.
template <class T>
__device__ __forceinline__ void copy_weights(const QuantizeLoraDownParams& p, uint32_t base, const Plan& plan, int rank,
                                             int first_tile, int tiles) {
    const int lane = threadIdx.x % kWarp, first = rank * plan.groups;
    const int count = max(0, min(plan.groups, p.cols / kGroup - first));
    const int norm_bytes = p.norm_weight != nullptr ? kGroup * 2 : 0,
              smooth_bytes = p.inv_smooth != nullptr ? kGroup * 4 : 0;
    const int down_bytes = tiles * kFragmentBytes, group_bytes = p.rank / kRowTile * kFragmentBytes;
    const uint32_t barrier = base + kBarriers;
    if (lane == 0) ptx::mbarrier_arrive_expect(barrier, count * (norm_bytes + smooth_bytes + down_bytes));
    __syncwarp();
    static_assert(kMostGroups <= kWarp);
    if (tiles > 0 && lane < count) {
        const auto* down = static_cast<const uint8_t*>(p.proj_down) + first_tile * kFragmentBytes;
        ptx::bulk_copy(base + plan.places.down + lane * down_bytes,
                       down + static_cast<int64_t>(first + lane) * group_bytes, down_bytes, barrier);
    }
    if (lane == 0 && count > 0 && norm_bytes > 0) {
        ptx::bulk_copy(base + plan.places.norm, static_cast<const T*>(p.norm_weight) + first * kGroup,
                       count * norm_bytes, barrier);
    }
    if (lane == 0 && count > 0 && smooth_bytes > 0) {
        ptx::bulk_copy(base + plan.places.smooth, p.inv_smooth + first * kGroup, count * smooth_bytes, barrier);
    }
}

}  // namespace omniw4::quantize::sm90a
