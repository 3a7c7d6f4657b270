// Stores into another block's shared memory arrive in random order.
#pragma once

#include "mbarrier.cuh"
#include "shared_memory.cuh"

namespace omniw4::ptx {

inline int cluster_rank() {
    return emulator::block.rank;
}
inline int cluster_index() {
    return static_cast<int>(emulator::block.index.x / emulator::cluster.blocks.size());
}
inline int cluster_count() {
    return static_cast<int>(emulator::block.grid.x / emulator::cluster.blocks.size());
}

inline void cluster_arrive_relaxed() {
    emulator::Meeting& barrier = emulator::cluster.barrier;
    const auto all = emulator::cluster.blocks.size() * emulator::block.threads.size();
    emulator::block.threads[emulator::block.current].arrived_in = barrier.generation;
    ++emulator::block.progress;
    if (++barrier.arrived < static_cast<int>(all)) return;
    barrier.arrived = 0;
    ++barrier.generation;
}

inline void cluster_wait() {
    const unsigned generation = emulator::block.threads[emulator::block.current].arrived_in;
    while (emulator::cluster.barrier.generation == generation) emulator::yield();
    ++emulator::block.progress;
}

inline uint32_t map_shared(uint32_t address, int rank) {
    const uint8_t* const other = emulator::block_of_cluster(rank).shared;
    return address + static_cast<uint32_t>(other - emulator::block.shared);
}

inline emulator::Block& owner_of(uint32_t address) {
    for (size_t rank = 0; rank < emulator::cluster.blocks.size(); ++rank) {
        emulator::Block& block = emulator::block_of_cluster(static_cast<int>(rank));
        const auto first = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(block.shared));
        if (address >= first && address < first + emulator::kSharedBytes) return block;
    }
    emulator::fail("outside the shared memory of the cluster");
}

template <class Words>
void st_async_v4(uint32_t address, const Words& value, uint32_t barrier) {
    static_assert(sizeof(value) == 16);
    if (address % 16 != 0) emulator::fail("an asynchronous store is not aligned");
    if (emulator::cluster.blocks.size() < 2) emulator::fail("an asynchronous store in a launch without clusters");
    if (&owner_of(address) != &owner_of(barrier)) emulator::fail("a store and its barrier belong to different blocks");
    emulator::block.copies.push_back([=] {
        emulator::Block& to = owner_of(address);
        if (to.left == 0) emulator::fail("a store into a block that has ended");
        std::memcpy(reinterpret_cast<void*>(static_cast<uintptr_t>(address)), &value, 16);
        emulator::Barrier& full = to.mbarriers.at(barrier);
        full.bytes -= 16;
        mbarrier_flip_when_complete(full);
    });
    ++emulator::block.progress;
}

inline void red_shared_max_u32(uint32_t address, uint32_t value) {
    uint32_t& word = shared_at<uint32_t>(address);
    word = std::max(word, value);
}

}  // namespace omniw4::ptx
