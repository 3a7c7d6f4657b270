#pragma once

namespace omniw4::ptx {

// The first lane; all of them have to be here.
inline bool elect_one() {
    __syncwarp();
    return threadIdx.x % 32 == 0;
}

}  // namespace omniw4::ptx
