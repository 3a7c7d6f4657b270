// gemm_lora_up, family wgmma_s8, integer group scales, BF16: tiles whose K a cluster shares out.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __nv_bfloat16;
using namespace sm90a::integer;
const Entries<T, ClusterTiles> kKernels;
}  // namespace

Status launch_integer_bfloat16_cluster_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                             cudaStream_t stream) {
    return launch_one_of<T>(ClusterTiles{}, static_cast<int>(tile) - kFirstCluster, p, multiprocessors, stream);
}

}  // namespace omniw4::gemm
