// Copies are done when a wait asks for them and no earlier: data that is read too soon, or a stage that is fetched into
// while others still read it, gives wrong results.
#pragma once

namespace omniw4::ptx {

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(pointer));
}

inline void cp_async_16(uint32_t destination, const void* source, bool valid) {
    if ((destination | reinterpret_cast<uintptr_t>(source)) % 16 != 0) emulator::fail("a copy is not of 16-byte words");
    emulator::current_thread().open.push_back([=] {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        std::memcpy(reinterpret_cast<void*>(static_cast<uintptr_t>(destination)), valid ? source : &zero, 16);
    });
    ++emulator::block.progress;
}

inline void cp_async_commit() {
    emulator::Thread& thread = emulator::current_thread();
    thread.committed.push_back(std::move(thread.open));
    thread.open.clear();
}

template <int pending>
void cp_async_wait() {
    emulator::Thread& thread = emulator::current_thread();
    while (thread.committed.size() > pending) {
        for (const emulator::Work& copy : thread.committed.front()) copy();
        thread.committed.pop_front();
    }
}

}  // namespace omniw4::ptx
