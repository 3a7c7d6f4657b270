// round_columns: the columns of one group, one after another, a thread a row with its 64 values in registers.
//
// Every block keeps the group's coupling in shared memory, where all its threads read the same word at once. Nothing is
// summed across threads and no product is fused with a sum, so a row's bits depend on nothing but the row.
#include "../common/fragment.cuh"
#include "../common/launch.h"

namespace omniw4 {
namespace {

constexpr int kThreads = 64;
constexpr float kCodeMin = -8.0f, kCodeMax = 7.0f;

template <bool kKnown>
__global__ void __launch_bounds__(kThreads) round_columns_kernel(RoundColumnsParams p) {
    __shared__ float4 coupling[kGroup][kGroup / 4];
    const int64_t batch = blockIdx.y;
    const auto* given = reinterpret_cast<const float4*>(p.coupling) + batch * (kGroup * kGroup / 4);
    for (int i = threadIdx.x; i < kGroup * kGroup / 4; i += kThreads)
        coupling[i / (kGroup / 4)][i % (kGroup / 4)] = given[i];
    __syncthreads();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= p.rows) return;
    const int64_t first = batch * kGroup * p.rows + row;  // of a column's neighbours, `rows` apart

    float value[kGroup], known[kKnown ? kGroup : 1];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        value[j] = p.values[first + j * p.rows];
        if constexpr (kKnown) known[j] = p.known[first + j * p.rows];
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
        const float code = fminf(fmaxf(rintf(value[j]), kCodeMin), kCodeMax);
        const float change = __fsub_rn(kKnown ? known[j] : value[j], code);
        p.codes[first + j * p.rows] = code;
        p.changes[first + j * p.rows] = change;
#pragma unroll
        for (int i = (j + 1) / 4; i < kGroup / 4; ++i) {
            const float4 c = coupling[j][i];
            if (4 * i > j) value[4 * i] = __fadd_rn(value[4 * i], __fmul_rn(c.x, change));
            if (4 * i + 1 > j) value[4 * i + 1] = __fadd_rn(value[4 * i + 1], __fmul_rn(c.y, change));
            if (4 * i + 2 > j) value[4 * i + 2] = __fadd_rn(value[4 * i + 2], __fmul_rn(c.z, change));
            if (4 * i + 3 > j) value[4 * i + 3] = __fadd_rn(value[4 * i + 3], __fmul_rn(c.w, change));
        }
    }
}

const Registration kFresh = registered<round_columns_kernel<false>>(kThreads, 0);
const Registration kFromKnown = registered<round_columns_kernel<true>>(kThreads, 0);

}  // namespace

Status launch_round_columns(const RoundColumnsParams& p, cudaStream_t stream) {
    if (p.batch < 0 || p.batch > 65535 || p.rows < 0 || p.rows > (int64_t{1} << 31)) return Status::kBadShape;
    if (p.batch == 0 || p.rows == 0) return Status::kOk;
    if (p.values == nullptr || p.coupling == nullptr || p.codes == nullptr || p.changes == nullptr) {
        return Status::kMissing;
    }
    if (!aligned16(p.coupling)) return Status::kMisaligned;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, kThreads)), static_cast<unsigned>(p.batch));
    const auto kernel = p.known == nullptr ? &round_columns_kernel<false> : &round_columns_kernel<true>;
    return launch_kernel(kernel, grid, kThreads, 0, stream, p);
}

}  // namespace omniw4
