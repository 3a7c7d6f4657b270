// Made by scripts/tune.py; measured on: NVIDIA H200, CUDA 13.0.
#pragma once

#include "integer_tile_sm90a.h"

namespace omniw4::gemm::sm90a::integer {

// Microseconds: of a wave of blocks whatever K, of a stage with all multiprocessors at work, of a stage with few.
struct TileCost {
    TileChoice choice;
    int features, tokens, blocks, splits, cluster;
    double wave, stage, stage_alone;
};
// clang-format off
constexpr TileCost kCosts[] = {
    {TileChoice::k64x16x4, 64, 16, 1, 4, 1, 2.000, 0.1855, 0.1855},
    {TileChoice::k64x16x2, 64, 16, 2, 2, 1, 1.800, 0.2735, 0.2138},
    {TileChoice::k64x32x4, 64, 32, 1, 4, 1, 2.400, 0.1883, 0.1883},
    {TileChoice::k64x32x2, 64, 32, 2, 2, 1, 1.800, 0.3052, 0.2414},
    {TileChoice::k64x48x2, 64, 48, 1, 2, 1, 1.900, 0.1976, 0.1976},
    {TileChoice::k64x64x2, 64, 64, 2, 2, 1, 2.200, 0.3510, 0.2587},
    {TileChoice::k64x96x2, 64, 96, 1, 2, 1, 2.400, 0.2130, 0.2130},
    {TileChoice::k64x96, 64, 96, 2, 1, 1, 2.100, 0.3607, 0.2512},
    {TileChoice::k128x64x2, 128, 64, 1, 2, 1, 2.400, 0.3372, 0.3372},
    {TileChoice::k128x96, 128, 96, 1, 1, 1, 2.500, 0.3247, 0.3247},
    {TileChoice::k128x128, 128, 128, 1, 1, 1, 2.800, 0.3525, 0.3525},
    {TileChoice::k128x176, 128, 176, 1, 1, 1, 3.300, 0.4223, 0.4180},
    {TileChoice::k128x192, 128, 192, 1, 1, 1, 3.600, 0.4673, 0.4456},
    {TileChoice::k192x96, 192, 96, 1, 1, 1, 3.100, 0.4443, 0.4326},
    {TileChoice::k192x128, 192, 128, 1, 1, 1, 3.600, 0.5643, 0.5308},
    {TileChoice::k192x176, 192, 176, 1, 1, 1, 4.000, 0.6784, 0.5989},
    {TileChoice::k192x192, 192, 192, 1, 1, 1, 4.200, 0.7442, 0.6530},
    {TileChoice::k64x16x4c2, 64, 16, 1, 4, 2, 2.600, 0.1933, 0.1345},
    {TileChoice::k64x16x4c4, 64, 16, 1, 4, 4, 2.400, 0.2677, 0.1349},
    {TileChoice::k128x64x2c2, 128, 64, 1, 2, 2, 3.400, 0.3334, 0.2855},
    {TileChoice::k128x128c2, 128, 128, 1, 1, 2, 3.800, 0.3864, 0.3339},
};
// clang-format on

}  // namespace omniw4::gemm::sm90a::integer
