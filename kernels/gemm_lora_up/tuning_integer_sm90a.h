// Made by scripts/tune.py from measurements on an NVIDIA H200, CUDA 13.0, of the kernels before their way out and their
// copies were rewritten; of tiles that were not there then, and where the rewrite must tell, estimates.
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
    {TileChoice::k64x16x4, 64, 16, 1, 4, 1.100, 0.1500, 0.1500},
    {TileChoice::k64x16x2, 64, 16, 2, 2, 1.300, 0.2000, 0.1600},
    {TileChoice::k64x32x4, 64, 32, 1, 4, 1.200, 0.1700, 0.1600},
    {TileChoice::k64x32x2, 64, 32, 2, 2, 1.600, 0.2300, 0.1900},
    {TileChoice::k64x64x2, 64, 64, 2, 2, 2.000, 0.3200, 0.2300},
    {TileChoice::k64x96x2, 64, 96, 1, 2, 1.900, 0.2100, 0.1900},
    {TileChoice::k64x96, 64, 96, 2, 1, 2.000, 0.3600, 0.2500},
    {TileChoice::k128x64x2, 128, 64, 1, 2, 2.200, 0.3000, 0.2700},
    {TileChoice::k128x128, 128, 128, 1, 1, 2.600, 0.3735, 0.3516},
    {TileChoice::k128x176, 128, 176, 1, 1, 2.900, 0.5000, 0.4600},
    {TileChoice::k192x128, 192, 128, 1, 1, 2.900, 0.5640, 0.5256},
    {TileChoice::k192x176, 192, 176, 1, 1, 3.200, 0.7053, 0.6190},
    {TileChoice::k256x128, 256, 128, 1, 1, 3.300, 0.7367, 0.6614},
};
// clang-format on

}  // namespace omniw4::gemm::sm90a::integer
