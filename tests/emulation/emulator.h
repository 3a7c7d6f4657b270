// CUDA on one CPU thread, as far as the kernels of families wgmma_s8 and mma_s8
// need it: the threads of a block are coroutines, and what threads do together
// (shuffles, barriers, products of a warp or a warpgroup) is done by the last
// to arrive. Included before every source by the compiler's -include.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <type_traits>
#include <unordered_map>
#include <vector>

#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__

namespace emulator {

constexpr int kSharedBytes = 227 * 1024;

struct Dim {
    unsigned x, y, z;
};

// A meeting of a fixed number of threads; `generation` tells one from the next.
struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
};

struct Warp {
    Meeting meeting;
    uint64_t words[2][32][16] = {};  // what lanes bring, and what the last of them
                                     // computes; two meetings' worth
};

using Work = std::function<void()>;

// A warpgroup's products: issued, closed in groups, done as late as a wait
// allows.
struct Warpgroup {
    Meeting issue, commit, wait;
    void* sums[2][128] = {};  // of int32_t or float
    const uint32_t* operands[2][128] = {};
    std::vector<Work> open;
    std::deque<std::vector<Work>> committed;
};

// An mbarrier.
struct Barrier {
    int arrivals = 0, pending = 0;
    int64_t bytes = 0;
    unsigned phase = 0;
};

struct Thread {
    ucontext_t context;
    Dim index;
    bool done = false;
    unsigned arrived_in = 0;  // generation of the cluster's barrier
    std::vector<Work> open;   // its cp.async: issued, and closed in groups
    std::deque<std::vector<Work>> committed;
};

// What a block's threads hold references to must not move when blocks are swapped: it lies in containers.
struct Block {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    std::vector<Meeting> barriers;
    std::unordered_map<uint32_t, Barrier> mbarriers;
    std::vector<Work> copies;  // under way
    Dim index, dim, grid;
    int rank = 0;  // in its cluster
    int current = 0;
    int left = 0;               // threads that have not ended
    int64_t progress = 0;       // anything a thread did but wait
    uint32_t asleep = 0;        // warps
    bool late_copies = false;   // copies wait until nobody can go on
    uint8_t* shared = nullptr;  // below 4 GiB, so that an address fits 32 bits
    Work kernel;
};
extern Block block;

// Blocks that run together, neighbours along x. The one whose turn it is has changed places with `block`.
struct Cluster {
    std::vector<Block> blocks;
    Meeting barrier;
    int current = 0;
};
extern Cluster cluster;

// Block number `rank` of the cluster that runs.
inline Block& block_of_cluster(int rank) {
    return rank == cluster.current ? block : cluster.blocks[rank];
}

// Runs `kernel` in every thread of every block, one cluster after the other. Ends the process, with a message, where a
// cluster cannot go on or leaves copies or bytes behind.
void run(Dim grid, int threads, Work kernel, int blocks_of_cluster = 1);

inline Thread& current_thread() {
    return block.threads[block.current];
}

[[noreturn]] void fail(const char* what);
void yield();
uint32_t random_number();

inline uint8_t* dynamic_shared() {
    return block.shared;
}

// The last of `count` threads does the work before all go on.
template <class F>
void meet(Meeting& meeting, int count, F&& last) {
    const unsigned generation = meeting.generation;
    ++block.progress;
    if (++meeting.arrived == count) {
        last();
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    while (meeting.generation == generation) yield();
}

// Lanes of a warp bring words; the last to arrive may compute more of them.
// Returns those of all lanes.
template <class F>
uint64_t (&meet_warp(const std::vector<uint64_t>& mine, F&& last))[32][16] {
    Warp& warp = block.warps[block.current / 32];
    auto& words = warp.words[warp.meeting.generation % 2];
    for (size_t i = 0; i < mine.size(); ++i) words[block.current % 32][i] = mine[i];
    meet(warp.meeting, 32, [&] { last(words); });
    return words;
}

template <class T>
T shuffle(T value, int from) {
    static_assert(sizeof(T) == 4);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto& words = meet_warp({bits}, [](auto&) {});
    bits = static_cast<uint32_t>(words[from & 31][0]);
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace emulator

#define threadIdx (emulator::block.threads[emulator::block.current].index)
#define blockIdx (emulator::block.index)
#define blockDim (emulator::block.dim)
#define gridDim (emulator::block.grid)

template <class A, class B>
auto min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}
template <class A, class B>
auto max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return static_cast<C>(a) > static_cast<C>(b) ? static_cast<C>(a) : static_cast<C>(b);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulator::shuffle(value, emulator::block.current % 32 ^ mask);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulator::shuffle(value, lane);
}
inline void __syncwarp() {
    emulator::shuffle(0, 0);
}
inline bool __all_sync(unsigned, bool mine) {
    bool all = true;
    for (const auto& lane : emulator::meet_warp({uint64_t{mine}}, [](auto&) {})) all = all && lane[0] != 0;
    return all;
}
inline void __syncthreads() {
    emulator::meet(emulator::block.barriers[0], static_cast<int>(emulator::block.dim.x), [] {});
}

inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __frcp_rn(float a) {
    return 1.0f / a;
}
inline float __fsqrt_rn(float a) {
    return std::sqrt(a);
}
inline float __fmaf_rn(float a, float b, float c) {
    return std::fma(a, b, c);
}
inline int __float2int_rn(float x) {
    if (std::isnan(x)) return 0;
    if (x >= 2147483648.0f) return INT32_MAX;
    if (x <= -2147483648.0f) return INT32_MIN;
    return static_cast<int>(std::nearbyint(x));
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline uint32_t __viaddmin_s16x2_relu(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = 0;
    for (int i = 0; i < 32; i += 16) {
        const auto sum = static_cast<int16_t>((a >> i) + (b >> i)), most = static_cast<int16_t>(c >> i);
        d |= static_cast<uint32_t>(std::max<int16_t>(std::min(sum, most), 0)) << i;
    }
    return d;
}
inline float __int2float_rn(int x) {
    return static_cast<float>(x);
}
inline float __uint_as_float(uint32_t x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
inline float __int_as_float(int x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t d = 0;
    for (int i = 0; i < 4; ++i) d |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return d;
}
template <class T>
T __ldg(const T* p) {
    return *p;
}
using std::isfinite;
