// pybind11 module emulated_columns: the launcher of round_columns, with addresses of host memory.
#include <pybind11/pybind11.h>

#include "round_columns/round_columns.cu"

namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

int run_round_columns(uintptr_t values, uintptr_t coupling, uintptr_t known, uintptr_t codes, uintptr_t changes,
                      int64_t batch, int64_t rows) {
    omniw4::RoundColumnsParams p{};
    p.values = pointer<float>(values);
    p.coupling = pointer<float>(coupling);
    p.known = pointer<float>(known);
    p.codes = pointer<float>(codes);
    p.changes = pointer<float>(changes);
    p.batch = batch;
    p.rows = rows;
    return static_cast<int>(omniw4::launch_round_columns(p, nullptr));
}

}  // namespace

PYBIND11_MODULE(emulated_columns, m) {
    m.def("round_columns", &run_round_columns);
}
