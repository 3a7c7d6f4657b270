// How the quantizer of layout wgmma_s8 is cut into blocks, warps and steps, and what it quantizes to.
#pragma once

#include "../common/fragment.cuh"
#include "../omniw4.h"

namespace omniw4::quantize::sm90a {

constexpr int kQuads = 8;
constexpr int kTree = 8;                        // groups whose low-rank products are added in a tree
constexpr int kMaxGroups = 512;                 // of a row
constexpr int kMostShared = 160 * 1024;         // bytes a block takes at most: of that many groups
constexpr int kFragmentBytes = 4 * kWarp * 16;  // proj_down of one group and sixteen ranks

enum class Grid { kGroups16, kGroupsInteger, kTokens8 };  // what shares a scale, and what it is

// How a kernel is cut: rows a block owns, steps a warp holds, n16 tiles of the rank a block multiplies; kReload: nothing
// is held, a warp takes the steps of kTree groups at a time, and rows are read again.
template <int tokens, int steps, int tiles, bool reload>
struct Cut {
    static constexpr int kTokens = tokens, kSteps = steps, kTiles = tiles;
    static constexpr bool kReload = reload;
    static constexpr int kStepGroups = kQuads / tokens;
    // Groups whose products become one entry of shared memory, a power of two up to kTree; entries of a warp's steps.
    static constexpr int kEntryGroups = steps * kStepGroups < kTree ? steps * kStepGroups : kTree;
    static constexpr int kEntrySteps = kEntryGroups / kStepGroups > 0 ? kEntryGroups / kStepGroups : 1;
    static constexpr int kEntries = steps / kEntrySteps;
    static_assert(!reload || kEntries == 1);
    // Registers a thread: where little is held, more warps share a multiprocessor.
    static constexpr int kMaxWarps = tokens == 1 ? 8 : 16;
    static constexpr int kRegisters = tokens == 1 ? 200 : tiles == 1 && steps <= 2 ? 64 : 128;
};

// Arguments beside the parameters: factor and share are clip over the spans of the grids.
struct Scales {
    Grid grid;
    float factor, share;
};

}  // namespace omniw4::quantize::sm90a
