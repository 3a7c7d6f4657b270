// quantize_lora_down, INT4 a (token, group of 64).
#include "quantize_lora_down.cuh"

namespace omniw4::quantize {
namespace {

template <class T>
Status launch_rank(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    const int tiles = p.rank / kRowTile;
    if (tiles == 0) return launch<T, 4, 0>(p, stream);
    if (tiles == 1) return launch<T, 4, 1>(p, stream);
    if (tiles == 2) return launch<T, 4, 2>(p, stream);
    return launch<T, 4, 8>(p, stream);
}

template <class T>
struct Kernels {
    Registration rank0 = registered<quantize_lora_down_kernel<T, 4, 0>>(kThreads, 0);
    Registration rank16 = registered<quantize_lora_down_kernel<T, 4, 1>>(kThreads, 0);
    Registration rank32 = registered<quantize_lora_down_kernel<T, 4, 2>>(kThreads, 0);
    Registration rank128 = registered<quantize_lora_down_kernel<T, 4, 8>>(kThreads, 0);
};

const Kernels<__half> kHalf;
const Kernels<__nv_bfloat16> kBFloat16;

}  // namespace

template <>
Status launch_width<4>(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_rank<__half>(p, stream) : launch_rank<__nv_bfloat16>(p, stream);
}

}  // namespace omniw4::quantize
