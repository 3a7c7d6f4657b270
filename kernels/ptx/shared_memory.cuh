// Shared memory by address. Loads are volatile: they stay where they are written, between a barrier's wait and the
// arrival that frees the stage, and next to the product that needs them, so that registers are not held for long.
#pragma once

#include <cstdint>

namespace omniw4::ptx {

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
    uint32_t d;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(address));
    return d;
}

__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
    uint32_t d;
    asm volatile("{.reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(d) : "r"(address));
    return d;
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    float d;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(d) : "r"(address));
    return d;
}

__device__ __forceinline__ void ld_shared_v2_b32(uint32_t (&d)[2], uint32_t address) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address));
}

__device__ __forceinline__ void ld_shared_v4_b32(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address));
}

__device__ __forceinline__ void ld_shared_v4_f32(float (&d)[4], uint32_t address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(address));
}

__device__ __forceinline__ void st_shared_b32(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_b16(uint32_t address, uint32_t value) {
    asm volatile("{.reg .u16 h; cvt.u16.u32 h, %1; st.shared.b16 [%0], h;}" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_f32(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared_v4_b32(uint32_t address, const uint4& value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

}  // namespace omniw4::ptx
