// Shared memory of a block, and the rings that the copying thread fills and two warpgroups empty.
#pragma once

#include "../common/fragment.cuh"
#include "../ptx/mbarrier.cuh"
#include "work.cuh"

namespace omniw4::attention {

constexpr int kWarpgroups = 2;  // that multiply
constexpr int kConsumerWarps = kWarpgroups * 4;
constexpr int kThreads = (kWarpgroups + 1) * 128;
constexpr int kPanelColumns = 64, kRowBytes = kPanelColumns * 2;  // a panel: rows of 128 bytes, swizzled

// Offsets in bytes.
template <int head_dim, int key_tile>
struct Plan {
    static constexpr int kPanels = head_dim / kPanelColumns;
    static constexpr int kQueryPanelBytes = kUnitRows * kRowBytes;
    static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;  // of a unit
    static constexpr int kTilePanelBytes = key_tile * kRowBytes;
    static constexpr int kTileBytes = kPanels * kTilePanelBytes;  // of keys, or of values

    static constexpr int kRoom = 227 * 1024 - 1024 - kWarpgroups * 2 * kQueryBytes - 1024;
    static constexpr int kStages = kRoom / (2 * kTileBytes) < 6 ? kRoom / (2 * kTileBytes) : 6;
    static_assert(kStages >= 2 && kTilePanelBytes % 1024 == 0);

    static constexpr int kQueries = 0;                                  // [warpgroup][panel][row]
    static constexpr int kKeys = kQueries + kWarpgroups * kQueryBytes;  // [stage][panel][key]
    static constexpr int kValues = kKeys + kStages * kTileBytes;        // [stage][panel][key]
    static constexpr int kOutput = kValues + kStages * kTileBytes;      // [warp][16 rows][head_dim]
    static constexpr int kBarriers = kOutput + kWarpgroups * kQueryBytes;
    static constexpr int kQueriesFull = kBarriers, kQueriesEmpty = kBarriers + 8;
    static constexpr int kTailReady = kBarriers + 16;  // two: the producer may be one work ahead
    static constexpr int kKeysFull = kBarriers + 32, kKeysEmpty = kKeysFull + kStages * 8;
    static constexpr int kValuesFull = kKeysEmpty + kStages * 8, kValuesEmpty = kValuesFull + kStages * 8;
    static constexpr int kBytes = 1024 + kValuesEmpty + kStages * 8;  // the first 1024 to align the rest
};

// A place in a ring of key or value tiles; producer and consumers go through the same sequence.
template <int stages>
struct Place {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void step() {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace omniw4::attention
