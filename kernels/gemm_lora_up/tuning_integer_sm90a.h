// Made by scripts/tune.py; measured on: NVIDIA H200, CUDA 13.0. Of 64x48x2, 128x96, 128x192, 192x96, 192x192: estimates.
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
    {TileChoice::k64x16x4, 64, 16, 1, 4, 2.200, 0.1825, 0.1825},
    {TileChoice::k64x16x2, 64, 16, 2, 2, 1.800, 0.2834, 0.2187},
    {TileChoice::k64x32x4, 64, 32, 1, 4, 2.400, 0.1900, 0.1900},
    {TileChoice::k64x32x2, 64, 32, 2, 2, 1.900, 0.3069, 0.2353},
    {TileChoice::k64x48x2, 64, 48, 1, 2, 2.300, 0.2000, 0.2000},
    {TileChoice::k64x64x2, 64, 64, 2, 2, 2.300, 0.3647, 0.2604},
    {TileChoice::k64x96x2, 64, 96, 1, 2, 2.400, 0.2182, 0.2182},
    {TileChoice::k64x96, 64, 96, 2, 1, 2.200, 0.3724, 0.2521},
    {TileChoice::k128x64x2, 128, 64, 1, 2, 2.500, 0.3531, 0.3531},
    {TileChoice::k128x96, 128, 96, 1, 1, 2.800, 0.3400, 0.3300},
    {TileChoice::k128x128, 128, 128, 1, 1, 3.000, 0.3687, 0.3603},
    {TileChoice::k128x176, 128, 176, 1, 1, 3.500, 0.4518, 0.4263},
    {TileChoice::k128x192, 128, 192, 1, 1, 3.600, 0.4900, 0.4600},
    {TileChoice::k192x96, 192, 96, 1, 1, 3.200, 0.4700, 0.4400},
    {TileChoice::k192x128, 192, 128, 1, 1, 3.600, 0.5716, 0.5300},
    {TileChoice::k192x176, 192, 176, 1, 1, 4.000, 0.7000, 0.6106},
    {TileChoice::k192x192, 192, 192, 1, 1, 4.200, 0.7700, 0.6700},
    {TileChoice::k256x128, 256, 128, 1, 1, 4.000, 0.7570, 0.6842},
};
// clang-format on

}  // namespace omniw4::gemm::sm90a::integer
