// pybind11 module emulated_mma_s8: the launchers of family mma_s8, with addresses of host memory.
#include <pybind11/pybind11.h>

#include "gemm_lora_up/gemm_lora_up_s8_sm80.cuh"
#include "quantize_lora_down/quantize_lora_down.cuh"

namespace {

namespace py = pybind11;
using namespace omniw4;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

int run_quantize(uintptr_t x, uintptr_t inv_rms, uintptr_t norm_weight, uintptr_t inv_smooth, uintptr_t proj_down,
                 uintptr_t qact, uintptr_t a_scales, uintptr_t lora_act, int64_t rows, int cols, int rank, int act_bits,
                 double clip, bool integer_scales) {
    QuantizeLoraDownParams p{};
    p.x = pointer<void>(x);
    p.inv_rms = pointer<float>(inv_rms);
    p.norm_weight = pointer<void>(norm_weight);
    p.inv_smooth = pointer<float>(inv_smooth);
    p.proj_down = pointer<void>(proj_down);
    p.qact = pointer<void>(qact);
    p.a_scales = pointer<void>(a_scales);
    p.lora_act = pointer<float>(lora_act);
    p.rows = rows;
    p.row_stride = cols;
    p.cols = cols;
    p.rank = rank;
    p.act_bits = act_bits;
    p.clip = clip;
    p.rotate = true;
    p.integer_scales = integer_scales;
    p.layout = Layout::kMmaS8;
    if (act_bits == 8) return static_cast<int>(quantize::launch_rank<__half, quantize::TokenBytes>(p, nullptr));
    return static_cast<int>(integer_scales ? quantize::launch_rank<__half, quantize::IntegerBytes>(p, nullptr)
                                           : quantize::launch_rank<__half, quantize::GroupBytes>(p, nullptr));
}

int run_gemm(uintptr_t qact, uintptr_t a_scales, uintptr_t qweight, uintptr_t w_scales, uintptr_t row_scales,
             uintptr_t lora_act, uintptr_t proj_up, uintptr_t bias, uintptr_t residual, uintptr_t y, int64_t rows,
             int out_features, int in_features, int rank, bool lora_act_packed, int tile, int epilogue, int act_bits,
             const py::dict& heads) {
    GemmLoraUpParams p{};
    p.qact = pointer<void>(qact);
    p.a_scales = pointer<void>(a_scales);
    p.qweight = pointer<void>(qweight);
    p.w_scales = pointer<void>(w_scales);
    p.row_scales = pointer<float>(row_scales);
    p.lora_act = pointer<void>(lora_act);
    p.proj_up = pointer<void>(proj_up);
    p.bias = pointer<void>(bias);
    p.residual = pointer<void>(residual);
    p.y = pointer<void>(y);
    p.rows = rows;
    p.out_features = out_features;
    p.in_features = in_features;
    p.rank = rank;
    p.lora_act_packed = lora_act_packed;
    p.tile = tile;
    p.epilogue = static_cast<Epilogue>(epilogue);
    p.layout = Layout::kMmaS8;
    p.act_bits = act_bits;
    if (p.epilogue == Epilogue::kQkNormRope) {
        p.heads.q_weight = pointer<void>(heads["q_weight"].cast<uintptr_t>());
        p.heads.k_weight = pointer<void>(heads["k_weight"].cast<uintptr_t>());
        p.heads.cos = pointer<float>(heads["cos"].cast<uintptr_t>());
        p.heads.sin = pointer<float>(heads["sin"].cast<uintptr_t>());
        p.heads.positions = pointer<int64_t>(heads["positions"].cast<uintptr_t>());
        p.heads.table_rows = heads["table_rows"].cast<int64_t>();
        p.heads.q_heads = heads["q_heads"].cast<int>();
        p.heads.kv_heads = heads["kv_heads"].cast<int>();
        p.heads.head_dim = heads["head_dim"].cast<int>();
        p.heads.eps = 1e-6f;
    }
    return static_cast<int>(gemm::s8::launch_dtype<__half>(p, nullptr));
}

}  // namespace

PYBIND11_MODULE(emulated_mma_s8, m) {
    m.def("quantize", &run_quantize);
    m.def("gemm_lora_up", &run_gemm);
}
