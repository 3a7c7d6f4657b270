#pragma once

namespace omniw4::ptx {

inline void mbarrier_flip_when_complete(emulator::Barrier& barrier) {
    if (barrier.pending < 0) emulator::fail("more threads arrived than a barrier counts");
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.arrivals;
}

inline void mbarrier_init(uint32_t barrier, int arrivals) {
    emulator::block.mbarriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void mbarrier_init_fence() {}

inline void mbarrier_arrive_expect(uint32_t address, uint32_t bytes) {
    emulator::Barrier& barrier = emulator::block.mbarriers.at(address);
    barrier.bytes += bytes;
    --barrier.pending;
    ++emulator::block.progress;
    mbarrier_flip_when_complete(barrier);
}
inline void mbarrier_arrive(uint32_t address) {
    mbarrier_arrive_expect(address, 0);
}
inline void mbarrier_arrive(uint32_t address, int count) {
    emulator::block.mbarriers.at(address).pending -= count - 1;
    mbarrier_arrive(address);
}

inline void mbarrier_wait(uint32_t address, uint32_t parity) {
    const emulator::Barrier& barrier = emulator::block.mbarriers.at(address);
    while (barrier.phase == parity) emulator::yield();
    ++emulator::block.progress;
}

}  // namespace omniw4::ptx
