#pragma once

#include <cstdint>

namespace omniw4::ptx {

// Copies one box of a 2-D tensor to shared memory: x counts elements of a row, y rows. What lies outside the tensor
// becomes 0. The barrier receives the bytes of the whole box. `map` is the address of a tensor map.
__device__ __forceinline__ void tensor_copy_2d(uint32_t destination, const void* map, int32_t x, int32_t y,
                                               uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Brings a tensor map closer to the unit that copies.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace omniw4::ptx
