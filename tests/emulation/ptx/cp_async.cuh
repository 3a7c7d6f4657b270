#pragma once

namespace omniw4::ptx {

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer));
}

}  // namespace omniw4::ptx
