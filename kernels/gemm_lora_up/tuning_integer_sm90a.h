// Made by scripts/tune.py from measurements on an NVIDIA H200, CUDA 13.0. Of tiles with splits they are estimates still.
#pragma once

#include "integer_tile_sm90a.h"

namespace omniw4::gemm::sm90a::integer {

// Microseconds: of a wave of blocks whatever K, of a stage with all multiprocessors at work, of a stage with few.
struct TileCost {
    TileChoice choice;
    int features, tokens, blocks, splits;
    double wave, stage, stage_alone;
};
// clang-format off
constexpr TileCost kCosts[] = {
    {TileChoice::k64x16x4, 64, 16, 1, 4, 1.5, 0.1, 0.08},
    {TileChoice::k64x16x2, 64, 16, 2, 2, 1.5, 0.2, 0.12},
    {TileChoice::k64x32x4, 64, 32, 1, 4, 1.7, 0.12, 0.09},
    {TileChoice::k64x32x2, 64, 32, 2, 2, 1.8, 0.25, 0.14},
    {TileChoice::k64x64x2, 64, 64, 2, 2, 2.3, 0.35, 0.16},
    {TileChoice::k64x96, 64, 96, 2, 1, 2.4, 0.384, 0.2367},
    {TileChoice::k128x48x2, 128, 48, 1, 2, 2.3, 0.2, 0.18},
    {TileChoice::k128x64x2, 128, 64, 1, 2, 2.5, 0.24, 0.2},
    {TileChoice::k128x96x2, 128, 96, 1, 2, 2.6, 0.3, 0.27},
    {TileChoice::k128x128, 128, 128, 1, 1, 3.2, 0.3847, 0.3817},
    {TileChoice::k192x128, 192, 128, 1, 1, 3.8, 0.5449, 0.5121},
    {TileChoice::k192x176, 192, 176, 1, 1, 4.0, 0.7218, 0.6631},
    {TileChoice::k256x128, 256, 128, 1, 1, 4.0, 0.7449, 0.6872},
};
// clang-format on

}  // namespace omniw4::gemm::sm90a::integer
