#pragma once

namespace omniw4::ptx {

inline uint4 ld_global_once(const void* source) {
    uint4 d;
    std::memcpy(&d, source, 16);
    return d;
}

}  // namespace omniw4::ptx
