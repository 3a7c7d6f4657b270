#include "emulator.h"

#include <sys/mman.h>

namespace emulator {

Block block;

namespace {

constexpr size_t kStackBytes = 96 * 1024;
constexpr int kIdleRounds = 4;  // without progress, and nothing on its way: nobody can go on

void enter() {
    block.kernel();
    block.threads[block.current].done = true;
    ++block.progress;
    yield();
}

// Shared memory holds NaN, and large integers, before a block writes it.
void begin_block(int threads, std::vector<std::vector<char>>& stacks) {
    for (int i = 0; i < kSharedBytes; i += 4) {
        const uint32_t poison = 0x7fc07fc0u + random_number() % 7;
        std::memcpy(block.shared + i, &poison, 4);
    }
    block.warps.assign((threads + 31) / 32, Warp{});
    block.warpgroups.clear();
    block.warpgroups.resize((threads + 127) / 128);
    for (Meeting& barrier : block.barriers) barrier = Meeting{};
    block.mbarriers.clear();
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

// Threads take turns. Now and then some warps sleep for a while, and in half of
// the blocks copies wait until nobody can go on, so that others run as far
// ahead as they may.
void run_block(int threads) {
    int left = threads, idle = 0;
    int64_t seen = -1;
    uint32_t asleep = 0;
    const bool late_copies = random_number() % 2 == 0;
    while (left > 0) {
        if (random_number() % 8 == 0) asleep = random_number() % 2 == 0 ? 0 : random_number() & random_number();
        const int first = static_cast<int>(random_number() % threads);
        for (int i = 0; i < threads; ++i) {
            block.current = (first + i) % threads;
            Thread& thread = block.threads[block.current];
            if (thread.done || asleep >> block.current / 32 & 1) continue;
            swapcontext(&block.scheduler, &thread.context);
            left -= thread.done;
        }
        const bool stuck = block.progress == seen;
        if (!late_copies || (stuck && asleep == 0)) complete_copies();
        idle = stuck && asleep == 0 && block.progress == seen ? idle + 1 : 0;
        if (idle == kIdleRounds) fail("threads wait for ever");
        if (stuck) asleep = 0;
        seen = block.progress;
    }
    if (!block.copies.empty()) fail("copies were under way when the block ended");
    for (const auto& [address, barrier] : block.mbarriers) {
        if (barrier.bytes != 0) fail("a barrier waits for bytes that nobody copies");
    }
}

}  // namespace

void fail(const char* what) {
    std::fprintf(stderr, "emulated block (%u, %u): %s\n", block.index.x, block.index.y, what);
    std::abort();
}

void yield() {
    swapcontext(&block.threads[block.current].context, &block.scheduler);
}

uint32_t random_number() {
    block.random ^= block.random << 13;
    block.random ^= block.random >> 17;
    block.random ^= block.random << 5;
    return block.random;
}

void run(Dim grid, int threads, Work kernel) {
    if (block.shared == nullptr) {
        void* memory =
            mmap(nullptr, 256 * 1024, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
        if (memory == MAP_FAILED) fail("no memory below 4 GiB");
        block.shared = static_cast<uint8_t*>(memory);
    }
    static std::vector<std::vector<char>> stacks;
    while (static_cast<int>(stacks.size()) < threads) stacks.emplace_back(kStackBytes);
    block.kernel = std::move(kernel);
    block.grid = grid;
    block.dim = {static_cast<unsigned>(threads), 1, 1};
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
            block.index = {x, y, 0};
            begin_block(threads, stacks);
            run_block(threads);
        }
    }
}

}  // namespace emulator
