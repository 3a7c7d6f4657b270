// quantize_lora_down in layout wgmma_s8, BF16.
#include "launch_sm90a.cuh"

namespace omniw4::quantize {

namespace {
using T = __nv_bfloat16;
const sm90a::Kernels<T, sm90a::GroupsInteger> kInteger;
const sm90a::Kernels<T, sm90a::Groups16> kFloat16;
const sm90a::Kernels<T, sm90a::Tokens8> kTokens;
}  // namespace

Status launch_bfloat16_sm90a(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    if (p.act_bits == 8) return sm90a::launch_grid<T, sm90a::Tokens8>(p, stream);
    return p.integer_scales ? sm90a::launch_grid<T, sm90a::GroupsInteger>(p, stream)
                            : sm90a::launch_grid<T, sm90a::Groups16>(p, stream);
}

}  // namespace omniw4::quantize
