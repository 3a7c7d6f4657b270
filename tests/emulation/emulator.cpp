#include "emulator.h"

#include <sys/mman.h>

namespace emulator {

Block block;
Cluster cluster;

namespace {

constexpr size_t kStackBytes = 96 * 1024;
constexpr size_t kBlockBytes = 256 * 1024;
constexpr int kMaxCluster = 16;
constexpr int kIdleRounds = 4;  // without progress, and nothing on its way: nobody can go on
ucontext_t scheduler;

void enter() {
    block.kernel();
    block.threads[block.current].done = true;
    ++block.progress;
    yield();
}

// Shared memory holds NaN, and large integers, before a block writes it.
void begin_block(int threads, std::vector<char>* stacks) {
    for (int i = 0; i < kSharedBytes; i += 4) {
        const uint32_t poison = 0x7fc07fc0u + random_number() % 7;
        std::memcpy(block.shared + i, &poison, 4);
    }
    block.warps.assign((threads + 31) / 32, Warp{});
    block.warpgroups.clear();
    block.warpgroups.resize((threads + 127) / 128);
    block.barriers.assign(16, Meeting{});
    block.mbarriers.clear();
    block.copies.clear();
    block.left = threads;
    block.asleep = 0;
    block.late_copies = random_number() % 2 == 0;
    block.threads.assign(threads, Thread{});
    for (int i = 0; i < threads; ++i) {
        Thread& thread = block.threads[i];
        thread.index = {static_cast<unsigned>(i), 0, 0};
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks[i].data();
        thread.context.uc_stack.ss_size = kStackBytes;
        makecontext(&thread.context, enter, 0);
    }
}

// A few of the copies under way, in no order.
void complete_copies() {
    for (uint32_t n = 1 + random_number() % 3; n > 0 && !block.copies.empty(); --n) {
        const size_t at = random_number() % block.copies.size();
        const Work copy = block.copies[at];
        block.copies.erase(block.copies.begin() + static_cast<std::ptrdiff_t>(at));
        copy();
        ++block.progress;
    }
}

void change_places(int rank) {
    std::swap(block, cluster.blocks[rank]);
    cluster.current = rank;
}

// One turn for every thread of the block. Now and then some warps sleep for a while, and in half of the blocks copies wait
// until nobody can go on, so that others run as far ahead as they may. `stuck`: nobody went on in the round before.
void run_round(bool stuck) {
    const int threads = static_cast<int>(block.threads.size());
    if (stuck) block.asleep = 0;
    if (random_number() % 8 == 0) block.asleep = random_number() % 2 == 0 ? 0 : random_number() & random_number();
    const int first = static_cast<int>(random_number() % threads);
    for (int i = 0; i < threads; ++i) {
        block.current = (first + i) % threads;
        Thread& thread = block.threads[block.current];
        if (thread.done || block.asleep >> block.current / 32 & 1) continue;
        swapcontext(&scheduler, &thread.context);
        block.left -= thread.done;
    }
    if (!block.late_copies || block.left == 0 || (stuck && block.asleep == 0)) complete_copies();
}

void run_cluster() {
    const int blocks = static_cast<int>(cluster.blocks.size());
    int64_t seen = -1;
    int idle = 0;
    bool stuck = false;
    for (int left = 1; left > 0;) {
        int64_t progress = 0;
        bool asleep = false;
        left = 0;
        for (int rank = 0; rank < blocks; ++rank) {
            change_places(rank);
            run_round(stuck);
            left += block.left + static_cast<int>(block.copies.size());
            progress += block.progress;
            asleep = asleep || block.asleep != 0;
            change_places(rank);
        }
        stuck = progress == seen;
        idle = stuck && !asleep ? idle + 1 : 0;
        if (idle == kIdleRounds) fail("threads wait for ever");
        seen = progress;
    }
    for (const Block& one : cluster.blocks) {
        for (const auto& [address, barrier] : one.mbarriers) {
            if (barrier.bytes != 0) fail("a barrier waits for bytes that nobody copies");
        }
    }
}

}  // namespace

void fail(const char* what) {
    std::fprintf(stderr, "emulated block (%u, %u): %s\n", block.index.x, block.index.y, what);
    std::abort();
}

void yield() {
    swapcontext(&block.threads[block.current].context, &scheduler);
}

uint32_t random_number() {
    static uint32_t state = 1;
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

void run(Dim grid, int threads, Work kernel, int blocks_of_cluster) {
    static uint8_t* memory = nullptr;
    if (memory == nullptr) {
        void* found = mmap(nullptr, kMaxCluster * kBlockBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
        if (found == MAP_FAILED) fail("no memory below 4 GiB");
        memory = static_cast<uint8_t*>(found);
    }
    if (blocks_of_cluster > kMaxCluster || grid.x % blocks_of_cluster != 0) fail("no such cluster");
    static std::vector<std::vector<char>> stacks;
    while (static_cast<int>(stacks.size()) < threads * blocks_of_cluster) stacks.emplace_back(kStackBytes);
    cluster.blocks.resize(blocks_of_cluster);
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; x += blocks_of_cluster) {
            cluster.barrier = Meeting{};
            for (int rank = 0; rank < blocks_of_cluster; ++rank) {
                change_places(rank);
                block.kernel = kernel;
                block.grid = grid;
                block.dim = {static_cast<unsigned>(threads), 1, 1};
                block.index = {x + rank, y, 0};
                block.rank = rank;
                block.shared = memory + rank * kBlockBytes;
                begin_block(threads, &stacks[static_cast<size_t>(rank) * threads]);
                change_places(rank);
            }
            run_cluster();
        }
    }
}

}  // namespace emulator
