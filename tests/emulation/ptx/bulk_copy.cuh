#pragma once

#include "mbarrier.cuh"

namespace omniw4::ptx {

inline void bulk_check(uint32_t destination, const void* source, uint32_t bytes) {
    const auto from = reinterpret_cast<uintptr_t>(source);
    if (bytes == 0 || (bytes | destination | from) % 16 != 0) emulator::fail("a bulk copy is not of 16-byte words");
}

inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    bulk_check(destination, source, bytes);
    emulator::block.copies.push_back([=] {
        std::memcpy(reinterpret_cast<void*>(static_cast<uintptr_t>(destination)), source, bytes);
        emulator::Barrier& full = emulator::block.mbarriers.at(barrier);
        full.bytes -= bytes;
        mbarrier_flip_when_complete(full);
    });
    ++emulator::block.progress;
}

inline void bulk_prefetch_l2(const void* source, uint32_t bytes) {
    bulk_check(0, source, bytes);
}

}  // namespace omniw4::ptx
