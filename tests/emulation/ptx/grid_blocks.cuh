#pragma once

namespace omniw4::ptx {

inline uint32_t grid_blocks() {
    return gridDim.x;
}

}  // namespace omniw4::ptx
