// How the quantizer of layout wgmma_s8 is cut into clusters, blocks, warps and steps, and what it quantizes to.
#pragma once

#include "../common/fragment.cuh"
#include "../common/int4.cuh"
#include "../omniw4.h"

namespace omniw4::quantize::sm90a {

constexpr int kTree = 8;  // groups whose low-rank products are added in a tree
constexpr int kMaxCluster = 16;
constexpr int kPortableCluster = 8;
constexpr int kMostGroups = 32;                 // of a block
constexpr int kFragmentBytes = 4 * kWarp * 16;  // proj_down of one group and sixteen ranks
constexpr int kTileUnits = 2 * kWarp;           // float4 of sixteen ranks by sixteen tokens: fragments of two n8 tiles
constexpr int kMostShared = 220 * 1024;

enum class Grid { kGroups16, kGroupsInteger, kTokens8 };  // what shares a scale, and what it is

// The same as types: of an enumerator, compilers spell a kernel's name in different ways.
struct Groups16 {
    static constexpr Grid kGrid = Grid::kGroups16;
};
struct GroupsInteger {
    static constexpr Grid kGrid = Grid::kGroupsInteger;
};
struct Tokens8 {
    static constexpr Grid kGrid = Grid::kTokens8;
};

// factor and share: clip over the spans of the grids. A row (or group) is encoded the short way where its absmax is below
// `limit`: all of its codes fit 16 bits, none comes from NaN. From `ceiling` on it is infinite.
struct Scales {
    float factor, share, limit, ceiling;
};

// Where a block keeps what in shared memory, in bytes; what two row tiles in turn use is there twice.
struct Places {
    int absmax;   // [2][blocks][16 rows] of every block's groups
    int staged;   // [groups][16 rows] squares of this block
    int squares;  // [2][all groups][16 rows]
    int down;     // proj_down [groups][tiles][4][32] 16-byte fragments
    int norm;     // [groups][64] of T
    int smooth;   // [groups][64] FP32
    int partial;  // [runs][tiles][64 units] low-rank products of this block
    int sums;     // [2][all nodes][units of this block]
    int bytes;
};

// A cluster of blocks takes sixteen rows at a time, each block `groups` consecutive groups of K, each pair of its warps
// a run of kSteps of these: one warp eight rows, the other the other eight.
//
// Low-rank products are summed within a run, and the sums of `node_runs` runs within the block: a node, of a power of two
// of groups, at most kTree. `entry_nodes` nodes make kTree groups. Units, the float4 of a fragment, are shared out among
// the blocks of a cluster, `share` to each, a power of two.
struct Plan {
    Scales scales;
    Places places;
    int row_tiles, cluster, groups, tiles, nodes, all_nodes, node_runs, entry_nodes, share, share_shift;
};

// Which of a block's work a thread has. Made anew where it is needed again, it costs fewer registers than if it is kept.
struct Place {
    int lane, warp;  // the compiler knows of `warp` that it is the same in all lanes
    int t, quad, half, run;
    int slot, token;  // of sixteen rows: as stored, as read

    __device__ __forceinline__ Place()
        : lane(threadIdx.x % kWarp),
          warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / kWarp), 0)),
          t(lane & 3),
          quad(lane >> 2),
          half(warp & 1),
          run(warp >> 1),
          slot(half * 8 + quad),
          token((quad >> 1) * 4 + half * 2 + (quad & 1)) {}
};

// Groups a warp holds, whether a cluster takes several row tiles, one after the other, and registers a thread.
template <int steps, bool loops, int registers, int threads>
struct Cut {
    static constexpr int kSteps = steps, kRegisters = registers, kMaxThreads = threads;
    static constexpr bool kLoops = loops;
};
using One = Cut<1, false, 64, 512>;
using Two = Cut<2, false, 80, 512>;
using Four = Cut<4, false, 128, 512>;
using Many = Cut<2, true, 96, 512>;

}  // namespace omniw4::quantize::sm90a
