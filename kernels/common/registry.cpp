#include "launch.h"

namespace omniw4 {

namespace {

std::vector<KernelInfo>& kernels() {
    static std::vector<KernelInfo> list;
    return list;
}

}  // namespace

Registration::Registration(const char* name, const void* function, int threads, int dynamic_shared_bytes) {
    kernels().push_back({name, function, threads, dynamic_shared_bytes});
}

const std::vector<KernelInfo>& compiled_kernels() {
    return kernels();
}

}  // namespace omniw4
