// Made by scripts/tune.py; measured on: nothing yet, these are estimates.
#pragma once

#include "integer_tile_sm90a.h"

namespace omniw4::gemm::sm90a::integer {

// Microseconds: of a wave of blocks whatever K, of a stage with all multiprocessors at work, of a stage with few.
struct TileCost {
    TileChoice choice;
    int features, tokens, blocks;
    double wave, stage, stage_alone;
};
constexpr TileCost kCosts[] = {
    {TileChoice::k64x16, 64, 16, 3, 2.0, 0.22, 0.10},     {TileChoice::k64x32, 64, 32, 3, 2.1, 0.30, 0.11},
    {TileChoice::k64x64, 64, 64, 3, 2.3, 0.48, 0.14},     {TileChoice::k64x96, 64, 96, 2, 2.4, 0.44, 0.18},
    {TileChoice::k128x48, 128, 48, 2, 2.3, 0.42, 0.15},   {TileChoice::k128x64, 128, 64, 2, 2.4, 0.50, 0.17},
    {TileChoice::k128x96, 128, 96, 1, 2.5, 0.31, 0.22},   {TileChoice::k128x128, 128, 128, 1, 2.6, 0.39, 0.29},
    {TileChoice::k192x128, 192, 128, 1, 2.8, 0.49, 0.42}, {TileChoice::k192x176, 192, 176, 1, 3.0, 0.64, 0.56},
    {TileChoice::k256x128, 256, 128, 1, 3.0, 0.62, 0.55},
};

}  // namespace omniw4::gemm::sm90a::integer
