// Tiles of the mma_s4 GEMM and the choice between them. Tuning lives here, apart from the kernel.
#pragma once

#include <cstdint>

namespace omniw4::gemm::s4 {

constexpr int kStageGroups = 2;  // groups of K a pipeline stage holds

// rows x columns of the output a block owns, as warps_m x warps_n warps; stages of the pipeline; blocks wanted on one
// multiprocessor, which bounds the registers.
template <int rows, int columns, int warps_m, int warps_n, int stages, int blocks>
struct Tile {
    static constexpr int kRows = rows, kColumns = columns, kWarpsM = warps_m, kWarpsN = warps_n, kStages = stages;
    static constexpr int kBlocks = blocks, kThreads = warps_m * warps_n * 32;
    static constexpr int kWarpM16 = rows / warps_m / 16, kWarpN8 = columns / warps_n / 8;
    static constexpr int kSlicePitch = columns + 8;  // floats; the 8 keep the rows of a fragment in different banks
    static_assert(kWarpM16 * warps_m * 16 == rows && kWarpN8 * warps_n * 8 == columns && kWarpN8 % 2 == 0);
    static_assert(stages >= 3);
};

using LargeTile = Tile<128, 128, 2, 4, 3, 1>;
using SmallTile = Tile<16, 64, 1, 4, 4, 4>;
using SmallHeadTile = Tile<16, 128, 1, 8, 4, 2>;  // as wide as the widest head

// Small tiles until the large ones would fill a GPU half way; measured on no GPU yet, since the family's own are not at
// hand. Both give the same bits.
inline bool prefers_large_tile(int64_t rows, int64_t columns) {
    constexpr int64_t kHalfFull = 40;
    return rows > 64 && (rows + 127) / 128 * ((columns + 127) / 128) >= kHalfFull;
}

}  // namespace omniw4::gemm::s4
