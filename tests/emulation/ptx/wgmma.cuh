// Products are done when a wait asks for them and no earlier, from the operands as they are then: a register or a stage
// that is written again too soon gives a wrong sum.
#pragma once

namespace omniw4::ptx {

inline emulator::Warpgroup& warpgroup() {
    return emulator::block.warpgroups[emulator::block.current / 128];
}

inline void wgmma_fence() {}

inline void wgmma_commit() {
    emulator::Warpgroup& group = warpgroup();
    emulator::meet(group.commit, 128, [&] {
        group.committed.push_back(std::move(group.open));
        group.open.clear();
    });
}

template <int pending>
void wgmma_wait() {
    emulator::Warpgroup& group = warpgroup();
    emulator::meet(group.wait, 128, [&] {
        while (group.committed.size() > pending) {
            for (const emulator::Work& product : group.committed.front()) product();
            group.committed.pop_front();
        }
    });
}

inline uint64_t wgmma_descriptor_128b(uint32_t address) {
    return address >> 4;  // + 2 is 32 bytes further along, as in the real one
}

// Rows of 128 bytes, 16-byte chunks swizzled by row % 8.
inline int wgmma_byte(uint64_t descriptor, int row, int k) {
    const uint32_t address = static_cast<uint32_t>(descriptor << 4) + row * 128 + k;
    return *reinterpret_cast<const int8_t*>(static_cast<uintptr_t>(address ^ (address >> 7 & 7) << 4));
}

template <int n>
void wgmma_product(int32_t* const (&sums)[128], const uint32_t* const (&operands)[128], uint64_t b, bool accumulate) {
    static int a[64][32], x[n][32];
    for (int thread = 0; thread < 128; ++thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
        for (int i = 0; i < 16; ++i) {
            const int r = i / 4, k = r / 2 * 16 + t * 4 + i % 4;
            a[row + r % 2 * 8][k] = static_cast<int8_t>(operands[thread][r] >> i % 4 * 8);
        }
    }
    for (int column = 0; column < n; ++column) {
        for (int k = 0; k < 32; ++k) x[column][k] = wgmma_byte(b, column, k);
    }
    for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < n / 2; ++i) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8,
                      column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            int32_t sum = accumulate ? sums[thread][i] : 0;
            for (int k = 0; k < 32; ++k) sum += a[row][k] * x[column][k];
            sums[thread][i] = sum;
        }
    }
}

// product(sums of all threads, operands of all threads) is what a warpgroup issues.
template <class Sum, int count, class F>
void issue_product(Sum (&d)[count], const uint32_t (&a)[4], F product) {
    emulator::Warpgroup& group = warpgroup();
    const unsigned place = group.issue.generation % 2;
    group.sums[place][emulator::block.current % 128] = d;
    group.operands[place][emulator::block.current % 128] = a;
    emulator::meet(group.issue, 128, [&] {
        struct Operands {
            Sum* sums[128];
            const uint32_t* operands[128];
        } held;
        for (int i = 0; i < 128; ++i) held.sums[i] = static_cast<Sum*>(group.sums[place][i]);
        std::memcpy(held.operands, group.operands[place], sizeof held.operands);
        group.open.push_back([held, product] { product(held.sums, held.operands); });
    });
}

template <int n>
void wgmma_m64k32_s8(int32_t (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    issue_product(d, a, [b, accumulate](auto& sums, auto& operands) {
        wgmma_product<n>(sums, operands, b, accumulate);
    });
}

}  // namespace omniw4::ptx
