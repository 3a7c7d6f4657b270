// pack_lora_act: one thread writes the sixteen bytes that one lane of the GEMM will load.
#include "../common/fragment.cuh"
#include "../common/launch.h"
#include "../common/scalar.cuh"

namespace omniw4 {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) pack_lora_act_kernel(PackLoraActParams p) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t steps = ceil_div(p.rank, kRowTile), tiles = ceil_div(p.rows, kRowTile) * steps;
    const int64_t tile = index / kWarp;
    if (tile >= tiles) return;
    const Lane lane;
    const int64_t first_row = tile / steps * kRowTile + lane.g;
    const int64_t first_column = tile % steps * kRowTile + lane.t * 2;

    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int64_t row = first_row + (i % 2) * 8, column = first_column + (i / 2) * 8;
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bool inside = row < p.rows && column + j < p.rank;
            v[j] = inside ? p.lora_act[row * p.rank + column + j] : 0.0f;
        }
        word[i] = Scalar<T>::pack(v[0], v[1]);
    }
    static_cast<uint4*>(p.packed)[index] = make_uint4(word[0], word[1], word[2], word[3]);
}

template <class T>
Status launch(const PackLoraActParams& p, cudaStream_t stream) {
    const int64_t lanes = ceil_div(p.rows, kRowTile) * ceil_div(p.rank, kRowTile) * kWarp;
    pack_lora_act_kernel<T><<<static_cast<unsigned>(ceil_div(lanes, kThreads)), kThreads, 0, stream>>>(p);
    return launch_status();
}

const Registration kHalf = registered<pack_lora_act_kernel<__half>>(kThreads, 0);
const Registration kBFloat16 = registered<pack_lora_act_kernel<__nv_bfloat16>>(kThreads, 0);

}  // namespace

Status launch_pack_lora_act(const PackLoraActParams& p, cudaStream_t stream) {
    if (p.rows < 0 || p.rank < 0 || p.rank > kMaxRank || p.rows > (int64_t{1} << 31)) return Status::kBadShape;
    if (p.rows == 0 || p.rank == 0) return Status::kOk;
    if (p.lora_act == nullptr || p.packed == nullptr) return Status::kMissing;
    if (!aligned16(p.packed)) return Status::kMisaligned;
    switch (p.dtype) {
        case DType::kFloat16: return launch<__half>(p, stream);
        case DType::kBFloat16: return launch<__nv_bfloat16>(p, stream);
    }
    return Status::kUnsupported;
}

}  // namespace omniw4
