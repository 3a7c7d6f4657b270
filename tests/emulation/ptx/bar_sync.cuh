#pragma once

namespace omniw4::ptx {

inline void bar_sync(int barrier, int threads) {
    emulator::meet(emulator::block.barriers[barrier], threads, [] {});
}

}  // namespace omniw4::ptx
