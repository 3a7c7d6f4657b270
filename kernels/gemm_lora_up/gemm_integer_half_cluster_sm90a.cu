// gemm_lora_up, family wgmma_s8, integer group scales, FP16: tiles whose K a cluster shares out.
#include "gemm_integer_sm90a.cuh"

namespace omniw4::gemm {

namespace {
using T = __half;
using namespace sm90a::integer;
const Entries<T, ClusterTiles> kKernels;
}  // namespace

Status launch_integer_half_cluster_sm90a(const GemmLoraUpParams& p, TileChoice tile, int multiprocessors,
                                         cudaStream_t stream) {
    return launch_one_of<T>(ClusterTiles{}, static_cast<int>(tile) - kFirstCluster, p, multiprocessors, stream);
}

}  // namespace omniw4::gemm
