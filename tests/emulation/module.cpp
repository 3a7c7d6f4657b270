// pybind11 module emulated_kernels: the launchers of family wgmma_s8, with
// addresses of host memory; those of mma_s8 are in module_mma_s8.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace {

cudaError_t device_zero(int* device) {
    *device = 0;
    return cudaSuccess;
}

int multiprocessors = 132;

cudaError_t attribute(int* value, cudaDeviceAttr, int) {
    *value = multiprocessors;
    return cudaSuccess;
}

}  // namespace

#define cudaGetDevice device_zero
#define cudaDeviceGetAttribute attribute

#include "gemm_lora_up/choose_integer_sm90a.h"
#include "gemm_lora_up/gemm_integer_sm90a.cuh"
#include "qknorm_rope/qknorm_rope.cu"
#include "quantize_lora_down/launch_sm90a.cuh"

namespace {

namespace py = pybind11;
using namespace omniw4;
using namespace omniw4::gemm::sm90a::integer;

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
Status run_grid(const QuantizeLoraDownParams& p) {
    using namespace omniw4::quantize::sm90a;
    if (p.act_bits == 8) return launch_grid<T, Tokens8>(p, nullptr);
    return p.integer_scales ? launch_grid<T, GroupsInteger>(p, nullptr) : launch_grid<T, Groups16>(p, nullptr);
}

int run_quantize(uintptr_t x, uintptr_t inv_rms, uintptr_t norm_weight, uintptr_t inv_smooth, uintptr_t proj_down,
                 uintptr_t qact, uintptr_t a_scales, uintptr_t lora_act, int64_t rows, int cols, int rank, int act_bits,
                 double clip, bool rotate, bool integer_scales, float eps, int cut, bool weights_ready, bool bfloat16,
                 int on_multiprocessors) {
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
    p.rotate = rotate;
    p.integer_scales = integer_scales;
    p.eps = eps;
    p.cut = cut;
    p.weights_ready = weights_ready;
    p.layout = Layout::kWgmmaS8;
    multiprocessors = on_multiprocessors;
    const Status status = bfloat16 ? run_grid<__nv_bfloat16>(p) : run_grid<__half>(p);
    multiprocessors = 132;
    return static_cast<int>(status);
}

// q_weight, k_weight, cos, sin, positions; rows of the tables, query and key heads, their size.
QkNormRopeParams heads_of(const std::vector<uintptr_t>& heads) {
    QkNormRopeParams p{};
    if (heads.empty()) return p;
    p.q_weight = pointer<void>(heads[0]);
    p.k_weight = pointer<void>(heads[1]);
    p.cos = pointer<float>(heads[2]);
    p.sin = pointer<float>(heads[3]);
    p.positions = pointer<int64_t>(heads[4]);
    p.table_rows = static_cast<int64_t>(heads[5]);
    p.q_heads = static_cast<int>(heads[6]);
    p.kv_heads = static_cast<int>(heads[7]);
    p.head_dim = static_cast<int>(heads[8]);
    p.eps = 1e-6f;
    return p;
}

int run_qknorm_rope(uintptr_t qkv, const std::vector<uintptr_t>& heads, int64_t rows, int64_t row_stride, bool bfloat16) {
    QkNormRopeParams p = heads_of(heads);
    p.dtype = bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    p.qkv = pointer<void>(qkv);
    p.rows = rows;
    p.row_stride = row_stride;
    return static_cast<int>(launch_qknorm_rope(p, nullptr));
}

template <class T>
Status launch_numbered(const GemmLoraUpParams& p) {
    if (p.tile >= kFirstCluster) return launch_one_of<T>(ClusterTiles{}, p.tile - kFirstCluster, p, multiprocessors, nullptr);
    if (p.tile >= kFirstHigh) return launch_one_of<T>(HighTiles{}, p.tile - kFirstHigh, p, multiprocessors, nullptr);
    return launch_one_of<T>(LowTiles{}, p.tile - kFirstLow, p, multiprocessors, nullptr);
}

int run_gemm(uintptr_t qact, uintptr_t a_scales, uintptr_t qweight, uintptr_t row_scales, uintptr_t lora_act,
             uintptr_t proj_up, uintptr_t bias, uintptr_t residual, uintptr_t y, int64_t rows, int out_features,
             int in_features, int rank, int tile, int epilogue, const std::vector<int>& segment_ends,
             bool weights_ready, int on_multiprocessors, const std::vector<uintptr_t>& heads, bool bfloat16) {
    GemmLoraUpParams p{};
    p.qact = pointer<void>(qact);
    p.a_scales = pointer<void>(a_scales);
    p.qweight = pointer<void>(qweight);
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
    p.tile = tile;
    p.epilogue = static_cast<Epilogue>(epilogue);
    p.act_bits = 8;
    p.dtype = bfloat16 ? DType::kBFloat16 : DType::kFloat16;
    for (size_t i = 0; i < 3; ++i) p.segment_ends[i] = i < segment_ends.size() ? segment_ends[i] : INT32_MAX;
    p.weights_ready = weights_ready;
    p.heads = heads_of(heads);
    p.layout = Layout::kWgmmaS8;
    multiprocessors = on_multiprocessors;
    const Status status = bfloat16 ? launch_numbered<__nv_bfloat16>(p) : launch_numbered<__half>(p);
    multiprocessors = 132;
    return static_cast<int>(status);
}

}  // namespace

PYBIND11_MODULE(emulated_kernels, m) {
    m.attr("tiles") = kTileChoices;
    m.def("quantize", &run_quantize);
    m.def("choose_cut", [](int row_tiles, int rank, int padded_groups, int multiprocessors) {
        const auto choice = quantize::sm90a::choose(row_tiles, rank, padded_groups, multiprocessors);
        return (choice.cut + 1) * 64 + choice.groups;
    });
    m.def("gemm_lora_up", &run_gemm);
    m.def("qknorm_rope", &run_qknorm_rope);
    m.def("choose_tile", [](int64_t rows, int64_t features, int columns, int head_dim, int multiprocessors) {
        return static_cast<int>(choose_tile(rows, features, columns, multiprocessors, head_dim));
    });
    // (features, tokens, blocks, splits, cluster) of each, and its number as it says itself
    m.def("costs", [] {
        std::vector<std::tuple<int, int, int, int, int, int>> list;
        for (const TileCost& t : kCosts) {
            list.emplace_back(t.features, t.tokens, t.blocks, t.splits, t.cluster, static_cast<int>(t.choice));
        }
        return list;
    });
    // Microseconds that the choice would take a tile to need if these were its costs.
    m.def("estimate", [](int tile, std::tuple<double, double, double> costs, int64_t rows, int64_t features,
                         int columns, int multiprocessors) {
        TileCost cost = kCosts[tile - 1];
        std::tie(cost.wave, cost.stage, cost.stage_alone) = costs;
        return estimate(cost, rows, features, columns, multiprocessors);
    });
}
