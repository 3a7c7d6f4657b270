#pragma once

namespace omniw4::ptx {

template <class T>
T& shared_at(uint32_t address, size_t bytes = sizeof(T)) {
    const auto first = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(emulator::block.shared));
    if (address % bytes != 0) emulator::fail("an access to shared memory is not aligned");
    if (address < first || address + bytes > first + emulator::kSharedBytes) emulator::fail("outside shared memory");
    return *reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline uint32_t ld_shared_b32(uint32_t address) {
    return shared_at<uint32_t>(address);
}
inline uint32_t ld_shared_u16(uint32_t address) {
    return shared_at<uint16_t>(address);
}
inline float ld_shared_f32(uint32_t address) {
    return shared_at<float>(address);
}
inline void ld_shared_v2_b32(uint32_t (&d)[2], uint32_t address) {
    std::memcpy(d, &shared_at<uint32_t>(address, 8), 8);
}
inline void ld_shared_v4_b32(uint32_t (&d)[4], uint32_t address) {
    std::memcpy(d, &shared_at<uint32_t>(address, 16), 16);
}
inline void ld_shared_v4_f32(float (&d)[4], uint32_t address) {
    std::memcpy(d, &shared_at<float>(address, 16), 16);
}
inline void st_shared_b32(uint32_t address, uint32_t value) {
    shared_at<uint32_t>(address) = value;
}
inline void st_shared_b16(uint32_t address, uint32_t value) {
    shared_at<uint16_t>(address) = static_cast<uint16_t>(value);
}
inline void st_shared_v4_b32(uint32_t address, const uint4& value) {
    std::memcpy(&shared_at<uint32_t>(address, 16), &value, 16);
}
inline void st_shared_f32(uint32_t address, float value) {
    shared_at<float>(address) = value;
}

}  // namespace omniw4::ptx
