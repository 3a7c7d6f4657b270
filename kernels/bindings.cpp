// pybind11 module w4a4ops: addresses, sizes and a stream in, exceptions out. It knows no torch.
//
// Every function takes the device its pointers belong to, so that the caller's current device does not matter, and
// leaves the current device as it was. ValueError: sizes or alignment a kernel cannot run. RuntimeError: the launch
// failed, or no kernel is compiled for what was asked.
#include "gemm_lora_up/choose_integer_sm90a.h"
#include "omniw4.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <iterator>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifndef OMNIW4_ARCHS
#error "define OMNIW4_ARCHS, the architectures compiled for, as a string"
#endif

namespace py = pybind11;

namespace omniw4 {
namespace {

using Sizes = std::initializer_list<std::pair<const char*, int64_t>>;

const char* describe(Status status) {
    switch (status) {
        case Status::kOk: return "ok";
        case Status::kBadShape: return "sizes that no kernel can run";
        case Status::kMisaligned: return "a pointer or row stride that is not a multiple of 16 bytes";
        case Status::kMissing: return "a tensor that these options need is missing";
        case Status::kUnsupported: return "no kernel is compiled for these options";
        case Status::kLaunchFailed: return "the launch failed";
    }
    return "unknown status";
}

void raise_on_failure(Status status, const char* op, Sizes sizes) {
    if (status == Status::kOk) return;
    std::ostringstream message;
    message << op << ": " << describe(status);
    if (status == Status::kLaunchFailed) message << ", " << cudaGetErrorString(cudaGetLastError());
    message << " (";
    const char* separator = "";
    for (const auto& [name, value] : sizes) {
        message << separator << name << " " << value;
        separator = ", ";
    }
    message << ")";
    const bool callers_fault =
        status == Status::kBadShape || status == Status::kMisaligned || status == Status::kMissing;
    if (callers_fault) throw std::invalid_argument(message.str());
    throw std::runtime_error(message.str());
}

class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&previous_));
        if (device != previous_) check(cudaSetDevice(device));
        changed_ = device != previous_;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    static void check(cudaError_t error) {
        if (error == cudaSuccess) return;
        cudaGetLastError();
        throw std::runtime_error(std::string("cannot use the device: ") + cudaGetErrorString(error));
    }
    int previous_ = 0;
    bool changed_ = false;
};

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

DType dtype_of(const std::string& name) {
    if (name == "float16") return DType::kFloat16;
    if (name == "bfloat16") return DType::kBFloat16;
    throw std::invalid_argument("dtype is '" + name + "', wanted float16 or bfloat16");
}

Layout layout_of(const std::string& name) {
    if (name == "canonical") return Layout::kCanonical;
    if (name == "mma_s4") return Layout::kMmaS4;
    if (name == "mma_s8") return Layout::kMmaS8;
    if (name == "wgmma_s8") return Layout::kWgmmaS8;
    throw std::invalid_argument("layout is '" + name + "', wanted canonical, mma_s4, mma_s8 or wgmma_s8");
}

Epilogue epilogue_of(const std::string& name) {
    if (name == "plain") return Epilogue::kPlain;
    if (name == "residual") return Epilogue::kResidual;
    if (name == "swiglu") return Epilogue::kSwiglu;
    if (name == "qknorm_rope") return Epilogue::kQkNormRope;
    throw std::invalid_argument("epilogue is '" + name + "', wanted plain, residual, swiglu or qknorm_rope");
}

void inv_rms(uintptr_t x, uintptr_t out, int64_t rows, int64_t cols, int64_t row_stride, float eps,
             const std::string& dtype, int device, uintptr_t stream) {
    InvRmsParams p{};
    p.x = pointer<void>(x);
    p.inv_rms = pointer<float>(out);
    p.rows = rows;
    p.cols = cols;
    p.row_stride = row_stride;
    p.eps = eps;
    p.dtype = dtype_of(dtype);
    const DeviceGuard guard(device);
    const Status status = launch_inv_rms(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "inv_rms", {{"M", rows}, {"K", cols}, {"row stride", row_stride}});
}

void quantize_lora_down(uintptr_t x, uintptr_t inv_rms, uintptr_t norm_weight, uintptr_t inv_smooth,
                        uintptr_t proj_down, uintptr_t qact, uintptr_t a_scales, uintptr_t lora_act, int64_t rows,
                        int cols, int64_t row_stride, int rank, int act_bits, double clip, bool rotate,
                        const std::string& layout, const std::string& dtype, int device, uintptr_t stream,
                        bool integer_scales, float eps, bool weights_ready, int cut) {
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
    p.row_stride = row_stride;
    p.cols = cols;
    p.rank = rank;
    p.act_bits = act_bits;
    p.clip = clip;
    p.rotate = rotate;
    p.integer_scales = integer_scales;
    p.eps = eps;
    p.weights_ready = weights_ready;
    p.cut = cut;
    p.layout = layout_of(layout);
    p.dtype = dtype_of(dtype);
    const DeviceGuard guard(device);
    const Status status = launch_quantize_lora_down(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "quantize_lora_down",
                     {{"M", rows}, {"K", cols}, {"row stride", row_stride}, {"R", rank}, {"act_bits", act_bits}});
}

void pack_lora_act(uintptr_t lora_act, uintptr_t packed, int64_t rows, int rank, const std::string& dtype, int device,
                   uintptr_t stream) {
    PackLoraActParams p{};
    p.lora_act = pointer<float>(lora_act);
    p.packed = pointer<void>(packed);
    p.rows = rows;
    p.rank = rank;
    p.dtype = dtype_of(dtype);
    const DeviceGuard guard(device);
    const Status status = launch_pack_lora_act(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "pack_lora_act", {{"M", rows}, {"R", rank}});
}

QkNormRopeParams heads_of(uintptr_t q_weight, uintptr_t k_weight, uintptr_t cos, uintptr_t sin, uintptr_t positions,
                          int64_t table_rows, int q_heads, int kv_heads, int head_dim, float eps) {
    QkNormRopeParams p{};
    p.q_weight = pointer<void>(q_weight);
    p.k_weight = pointer<void>(k_weight);
    p.cos = pointer<float>(cos);
    p.sin = pointer<float>(sin);
    p.positions = pointer<int64_t>(positions);
    p.table_rows = table_rows;
    p.q_heads = q_heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.eps = eps;
    return p;
}

void qknorm_rope(uintptr_t qkv, uintptr_t q_weight, uintptr_t k_weight, uintptr_t cos, uintptr_t sin,
                 uintptr_t positions, int64_t rows, int64_t row_stride, int64_t table_rows, int q_heads, int kv_heads,
                 int head_dim, float eps, const std::string& dtype, int device, uintptr_t stream) {
    QkNormRopeParams p =
        heads_of(q_weight, k_weight, cos, sin, positions, table_rows, q_heads, kv_heads, head_dim, eps);
    p.qkv = pointer<void>(qkv);
    p.rows = rows;
    p.row_stride = row_stride;
    p.dtype = dtype_of(dtype);
    const DeviceGuard guard(device);
    const Status status = launch_qknorm_rope(p, pointer<CUstream_st>(stream));
    raise_on_failure(
        status, "qknorm_rope",
        {{"M", rows}, {"row stride", row_stride}, {"Hq", q_heads}, {"Hkv", kv_heads}, {"head_dim", head_dim}});
}

void rms_norm(uintptr_t x, uintptr_t delta, uintptr_t weight, uintptr_t y, uintptr_t sum, uintptr_t scales,
              int64_t rows, int cols, int64_t row_stride, float eps, bool fp8, const std::string& dtype, int device,
              uintptr_t stream) {
    RmsNormParams p{};
    p.x = pointer<void>(x);
    p.delta = pointer<void>(delta);
    p.weight = pointer<void>(weight);
    p.y = pointer<void>(y);
    p.sum = pointer<void>(sum);
    p.scales = pointer<float>(scales);
    p.rows = rows;
    p.row_stride = row_stride;
    p.cols = cols;
    p.eps = eps;
    p.dtype = dtype_of(dtype);
    p.fp8 = fp8;
    const DeviceGuard guard(device);
    const Status status = launch_rms_norm(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "rms_norm", {{"M", rows}, {"K", cols}, {"row stride", row_stride}});
}

void swiglu(uintptr_t gate_up, uintptr_t y, uintptr_t scales, int64_t rows, int cols, int64_t row_stride, bool fp8,
            const std::string& dtype, int device, uintptr_t stream) {
    SwigluParams p{};
    p.gate_up = pointer<void>(gate_up);
    p.y = pointer<void>(y);
    p.scales = pointer<float>(scales);
    p.rows = rows;
    p.row_stride = row_stride;
    p.cols = cols;
    p.dtype = dtype_of(dtype);
    p.fp8 = fp8;
    const DeviceGuard guard(device);
    const Status status = launch_swiglu(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "swiglu", {{"M", rows}, {"I", cols}, {"row stride", row_stride}});
}

void quantize_fp8(uintptr_t x, uintptr_t codes, uintptr_t scales, int64_t rows, int cols, int64_t row_stride,
                  const std::string& dtype, int device, uintptr_t stream) {
    QuantizeFp8Params p{};
    p.x = pointer<void>(x);
    p.codes = pointer<void>(codes);
    p.scales = pointer<float>(scales);
    p.rows = rows;
    p.row_stride = row_stride;
    p.cols = cols;
    p.dtype = dtype_of(dtype);
    const DeviceGuard guard(device);
    const Status status = launch_quantize_fp8(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "quantize_fp8", {{"M", rows}, {"K", cols}, {"row stride", row_stride}});
}

void round_columns(uintptr_t values, uintptr_t coupling, uintptr_t known, uintptr_t codes, uintptr_t changes,
                   int64_t batch, int64_t rows, int device, uintptr_t stream) {
    RoundColumnsParams p{};
    p.values = pointer<float>(values);
    p.coupling = pointer<float>(coupling);
    p.known = pointer<float>(known);
    p.codes = pointer<float>(codes);
    p.changes = pointer<float>(changes);
    p.batch = batch;
    p.rows = rows;
    const DeviceGuard guard(device);
    const Status status = launch_round_columns(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "round_columns", {{"B", batch}, {"N", rows}});
}

void gemm_lora_up(uintptr_t qact, uintptr_t a_scales, uintptr_t qweight, uintptr_t w_scales, uintptr_t lora_act,
                  uintptr_t proj_up, uintptr_t bias, uintptr_t residual, uintptr_t y, int64_t rows, int out_features,
                  int in_features, int rank, bool lora_act_packed, int tile, const std::string& epilogue,
                  const std::string& dtype, int device, uintptr_t stream, uintptr_t q_weight, uintptr_t k_weight,
                  uintptr_t cos, uintptr_t sin, uintptr_t positions, int64_t table_rows, int q_heads, int kv_heads,
                  int head_dim, float eps, const std::string& layout, int act_bits, uintptr_t row_scales,
                  const std::vector<int>& segment_ends, bool weights_ready) {
    GemmLoraUpParams p{};
    p.row_scales = pointer<float>(row_scales);
    if (segment_ends.size() > std::size(p.segment_ends)) throw std::invalid_argument("more than four segments");
    for (size_t i = 0; i < std::size(p.segment_ends); ++i) {
        p.segment_ends[i] = i < segment_ends.size() ? segment_ends[i] : INT32_MAX;
    }
    p.weights_ready = weights_ready;
    p.qact = pointer<void>(qact);
    p.a_scales = pointer<void>(a_scales);
    p.qweight = pointer<void>(qweight);
    p.w_scales = pointer<void>(w_scales);
    p.lora_act = pointer<void>(lora_act);
    p.proj_up = pointer<void>(proj_up);
    p.bias = pointer<void>(bias);
    p.residual = pointer<void>(residual);
    p.y = pointer<void>(y);
    p.heads = heads_of(q_weight, k_weight, cos, sin, positions, table_rows, q_heads, kv_heads, head_dim, eps);
    p.rows = rows;
    p.out_features = out_features;
    p.in_features = in_features;
    p.rank = rank;
    p.lora_act_packed = lora_act_packed;
    p.tile = tile;
    p.epilogue = epilogue_of(epilogue);
    p.dtype = dtype_of(dtype);
    p.layout = layout_of(layout);
    p.act_bits = act_bits;
    const DeviceGuard guard(device);
    const Status status = launch_gemm_lora_up(p, pointer<CUstream_st>(stream));
    raise_on_failure(status, "gemm_lora_up", {{"M", rows}, {"N", out_features}, {"K", in_features}, {"R", rank}});
}

void attention_varlen(uintptr_t qkv, uintptr_t cu_seqlens, uintptr_t out, int64_t rows, int64_t row_stride,
                      int64_t out_stride, int sequences, int max_seqlen, int q_heads, int kv_heads, int head_dim,
                      bool causal, float scale, const std::string& dtype, bool boundaries_ready, int device,
                      uintptr_t stream) {
    AttentionVarlenParams p{};
    p.qkv = pointer<void>(qkv);
    p.cu_seqlens = pointer<int32_t>(cu_seqlens);
    p.out = pointer<void>(out);
    p.rows = rows;
    p.row_stride = row_stride;
    p.out_stride = out_stride;
    p.sequences = sequences;
    p.max_seqlen = max_seqlen;
    p.q_heads = q_heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.causal = causal;
    p.scale = scale;
    p.dtype = dtype_of(dtype);
    p.boundaries_ready = boundaries_ready;
    const DeviceGuard guard(device);
    const Status status = launch_attention_varlen(p, pointer<CUstream_st>(stream));
    raise_on_failure(
        status, "attention_varlen",
        {{"P", rows}, {"sequences", sequences}, {"Hq", q_heads}, {"Hkv", kv_heads}, {"head_dim", head_dim}});
}

// The kernel in "const char* omniw4::kernel_name() [with auto kernel = KERNEL]".
std::string title(const char* spelled) {
    const std::string name = spelled;
    const size_t first = name.find(" = "), last = name.rfind(']');
    return first == std::string::npos || last == std::string::npos ? name : name.substr(first + 3, last - first - 3);
}

// What is compiled in; needs no GPU.
py::list kernels() {
    py::list list;
    for (const KernelInfo& kernel : compiled_kernels()) {
        py::dict entry;
        entry["name"] = title(kernel.name);
        entry["threads"] = kernel.threads;
        entry["dynamic_shared_bytes"] = kernel.dynamic_shared_bytes;
        list.append(entry);
    }
    return list;
}

std::vector<std::tuple<int, int, int, int, int>> integer_tiles() {
    std::vector<std::tuple<int, int, int, int, int>> list;
    for (const auto& tile : gemm::sm90a::integer::kCosts) {
        list.emplace_back(tile.features, tile.tokens, tile.blocks, tile.splits, tile.cluster);
    }
    return list;
}

int integer_tile(int64_t rows, int out_features, int in_features, int multiprocessors, int head_dim) {
    const int64_t features = (static_cast<int64_t>(out_features) + kColumnBlock - 1) / kColumnBlock * kColumnBlock;
    return static_cast<int>(gemm::sm90a::integer::choose_tile(rows, features, in_features, multiprocessors, head_dim));
}

// Whether a kernel is meant for a device: those for sm_90a run on no other, and family mma_s4 has no code for what comes
// after it.
bool meant_for(const std::string& kernel, int device) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        return true;
    }
    if (kernel.find("sm90a") != std::string::npos) return major == 9 && minor == 0;
    return major < 10 || kernel.find("gemm::s4::") == std::string::npos;
}

// Loads every kernel onto a device that can run it (a graph capture must not be the first to need one) and says what each
// one takes.
py::list load(int device) {
    const DeviceGuard guard(device);
    py::list list;
    for (const KernelInfo& kernel : compiled_kernels()) {
        if (!meant_for(kernel.name, device)) continue;
        cudaFuncAttributes attributes{};
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
        if (error != cudaSuccess) {
            cudaGetLastError();
            throw std::runtime_error(std::string("cannot load ") + kernel.name + ": " + cudaGetErrorString(error) +
                                     "; compiled for " OMNIW4_ARCHS);
        }
        if (kernel.dynamic_shared_bytes > 48 * 1024) {
            cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kernel.dynamic_shared_bytes);
        }
        int blocks = 0;
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function, kernel.threads,
                                                      kernel.dynamic_shared_bytes);
        py::dict entry;
        entry["name"] = title(kernel.name);
        entry["threads"] = kernel.threads;
        entry["registers"] = attributes.numRegs;
        entry["local_bytes"] = attributes.localSizeBytes;
        entry["shared_bytes"] = attributes.sharedSizeBytes + kernel.dynamic_shared_bytes;
        entry["blocks_per_multiprocessor"] = blocks;
        list.append(entry);
    }
    return list;
}

}  // namespace

PYBIND11_MODULE(w4a4ops, m) {
    using py::arg;
    m.doc() = "CUDA kernels of omniw4. Pointers, device and stream are integers; omniw4.ops checks the tensors.";
    m.attr("archs") = OMNIW4_ARCHS;
    m.def("kernels", &kernels, "Every kernel compiled in: name, threads, dynamic shared memory.");
    m.def("load", &load, arg("device"), "Load every kernel onto a device; registers, shared memory, occupancy there.");
    m.def("inv_rms", &inv_rms, py::kw_only(), arg("x"), arg("out"), arg("rows"), arg("cols"), arg("row_stride"),
          arg("eps"), arg("dtype"), arg("device"), arg("stream"));
    m.def("quantize_lora_down", &quantize_lora_down, py::kw_only(), arg("x"), arg("inv_rms"), arg("norm_weight"),
          arg("inv_smooth"), arg("proj_down"), arg("qact"), arg("a_scales"), arg("lora_act"), arg("rows"), arg("cols"),
          arg("row_stride"), arg("rank"), arg("act_bits"), arg("clip"), arg("rotate"), arg("layout"), arg("dtype"),
          arg("device"), arg("stream"), arg("integer_scales") = false, arg("eps") = 0.0f, arg("weights_ready") = false,
          arg("cut") = 0);
    m.def("pack_lora_act", &pack_lora_act, py::kw_only(), arg("lora_act"), arg("packed"), arg("rows"), arg("rank"),
          arg("dtype"), arg("device"), arg("stream"));
    m.def("qknorm_rope", &qknorm_rope, py::kw_only(), arg("qkv"), arg("q_weight"), arg("k_weight"), arg("cos"),
          arg("sin"), arg("positions"), arg("rows"), arg("row_stride"), arg("table_rows"), arg("q_heads"),
          arg("kv_heads"), arg("head_dim"), arg("eps"), arg("dtype"), arg("device"), arg("stream"));
    m.def("rms_norm", &rms_norm, py::kw_only(), arg("x"), arg("delta"), arg("weight"), arg("y"), arg("sum"),
          arg("scales"), arg("rows"), arg("cols"), arg("row_stride"), arg("eps"), arg("fp8"), arg("dtype"),
          arg("device"), arg("stream"));
    m.def("swiglu", &swiglu, py::kw_only(), arg("gate_up"), arg("y"), arg("scales"), arg("rows"), arg("cols"),
          arg("row_stride"), arg("fp8"), arg("dtype"), arg("device"), arg("stream"));
    m.def("quantize_fp8", &quantize_fp8, py::kw_only(), arg("x"), arg("codes"), arg("scales"), arg("rows"), arg("cols"),
          arg("row_stride"), arg("dtype"), arg("device"), arg("stream"));
    m.def("round_columns", &round_columns, py::kw_only(), arg("values"), arg("coupling"), arg("known"), arg("codes"),
          arg("changes"), arg("batch"), arg("rows"), arg("device"), arg("stream"));
    m.def("gemm_lora_up", &gemm_lora_up, py::kw_only(), arg("qact"), arg("a_scales"), arg("qweight"), arg("w_scales"),
          arg("lora_act"), arg("proj_up"), arg("bias"), arg("residual"), arg("y"), arg("rows"), arg("out_features"),
          arg("in_features"), arg("rank"), arg("lora_act_packed"), arg("tile"), arg("epilogue"), arg("dtype"),
          arg("device"), arg("stream"), arg("q_weight") = 0, arg("k_weight") = 0, arg("cos") = 0, arg("sin") = 0,
          arg("positions") = 0, arg("table_rows") = 0, arg("q_heads") = 0, arg("kv_heads") = 0, arg("head_dim") = 0,
          arg("eps") = 0.0f, arg("layout") = "mma_s4", arg("act_bits") = 4, arg("row_scales") = 0,
          arg("segment_ends") = std::vector<int>{}, arg("weights_ready") = false);
    m.def("integer_tiles", &integer_tiles,
          "Tiles of the wgmma_s8 GEMM with integer scales, in the order of their numbers from 1 on: (features, tokens, "
          "blocks, splits, cluster).");
    m.def("integer_tile", &integer_tile, py::kw_only(), arg("rows"), arg("out_features"), arg("in_features"),
          arg("multiprocessors"), arg("head_dim") = 0, "The number of the tile that suits a shape.");
    m.def("attention_varlen", &attention_varlen, py::kw_only(), arg("qkv"), arg("cu_seqlens"), arg("out"), arg("rows"),
          arg("row_stride"), arg("out_stride"), arg("sequences"), arg("max_seqlen"), arg("q_heads"), arg("kv_heads"),
          arg("head_dim"), arg("causal"), arg("scale"), arg("dtype"), arg("boundaries_ready"), arg("device"),
          arg("stream"));
}

}  // namespace omniw4
