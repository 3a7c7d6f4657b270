// quantize_lora_down in layout wgmma_s8, a block for whole rows: eight of them, half a row tile, in its registers. Blocks
// have nothing to tell each other; squares, absmax and low-rank products go through shared memory, with one barrier of
// the block where a token's scale is wanted, and one more for RMSNorm.
//
// Each warp has a run of kSteps groups. Sums have the order that quantize_lora_down_sm90a.cuh gives them.
#pragma once

#include "../ptx/bulk_copy.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/pdl.cuh"
#include "run_sm90a.cuh"

namespace omniw4::quantize::sm90a {

constexpr int kRowsOfBlock = kRowTile / 2;

// Groups a warp holds, and registers a thread.
template <int steps, int registers, int threads>
struct Rows {
    static constexpr int kSteps = steps, kRegisters = registers, kMaxThreads = threads;
    static constexpr bool kLoops = false;
};

using RowsOne = Rows<1, 64, 512>;
using RowsTwo = Rows<2, 80, 768>;
using RowsFour = Rows<4, 128, 512>;

// Where a block keeps what in shared memory, in bytes.
struct RowPlaces {
    int absmax;   // [runs][8 rows]
    int squares;  // [groups][8 rows]
    int down;     // proj_down [groups][tiles][4][32] 16-byte fragments
    int norm;     // [groups][64] of T
    int smooth;   // [groups][64] FP32
    int partial;  // [runs][tiles][32] float4: low-rank products
    int bytes;
};

struct RowPlan {
    Scales scales;
    RowPlaces places;
};

// Before x' is computed, and before the low-rank product.
constexpr int kNormBarrier = 0, kDownBarrier = 8, kBehindBarriers = 16;

// Copies norm weights, reciprocals of smooth and proj_down; called by one warp.
template <class T>
__device__ __forceinline__ void copy_weights(const QuantizeLoraDownParams& p, uint32_t base, const RowPlaces& places) {
    constexpr int kParts = 8;  // one after the other takes longer
    const int lane = threadIdx.x % kWarp, groups = p.cols / kGroup;
    const int norm_bytes = p.norm_weight != nullptr ? p.cols * 2 : 0,
              smooth_bytes = p.inv_smooth != nullptr ? p.cols * 4 : 0;
    const int parts = groups % kParts == 0 ? kParts : 1;
    const int part_bytes = groups / parts * (p.rank / kRowTile) * kFragmentBytes;
    if (lane == 0) {
        ptx::mbarrier_arrive_expect(base + kNormBarrier, norm_bytes + smooth_bytes);
        ptx::mbarrier_arrive_expect(base + kDownBarrier, parts * part_bytes);
        if (norm_bytes > 0) ptx::bulk_copy(base + places.norm, p.norm_weight, norm_bytes, base + kNormBarrier);
        if (smooth_bytes > 0) ptx::bulk_copy(base + places.smooth, p.inv_smooth, smooth_bytes, base + kNormBarrier);
    }
    __syncwarp();
    if (part_bytes > 0 && lane < parts) {
        const int at = lane * part_bytes;
        ptx::bulk_copy(base + places.down + at, static_cast<const uint8_t*>(p.proj_down) + at, part_bytes,
                       base + kDownBarrier);
    }
}

template <class T, class Scaled, bool kNorm, class Cut>
__global__ void __launch_bounds__(Cut::kMaxThreads) __maxnreg__(Cut::kRegisters)
    quantize_rows_kernel(const __grid_constant__ QuantizeLoraDownParams p, const __grid_constant__ RowPlan plan) {
    constexpr int kSteps = Cut::kSteps;
    constexpr int kTreeRuns = kTree / kSteps;
    constexpr Grid grid = Scaled::kGrid;
    extern __shared__ __align__(16) float shared[];
    ptx::pdl_launch_dependents();
    const int lane = threadIdx.x % kWarp, t = lane & 3, quad = lane >> 2;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / kWarp), 0), warps = blockDim.x / kWarp;
    const int groups = static_cast<uint32_t>(p.cols) / kGroup, tiles = static_cast<uint32_t>(p.rank) / kRowTile;
    const int first = warp * kSteps, count = min(kSteps, groups - first);
    const int row_tile = blockIdx.x / 2, half = blockIdx.x % 2, slot = half * kRowsOfBlock + quad;
    const int64_t row = static_cast<int64_t>(row_tile) * kRowTile + ((quad >> 1) * 4 + half * 2 + (quad & 1));
    const RowPlaces& places = plan.places;
    const uint32_t base = ptx::shared_address(shared);
    const auto in_shared = [&](int place) { return reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + place); };

    if (threadIdx.x == 0) {
        ptx::mbarrier_init(base + kNormBarrier, 1);
        ptx::mbarrier_init(base + kDownBarrier, 1);
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    if (!p.weights_ready) ptx::pdl_wait();
    if (warp == 0) copy_weights<T>(p, base, places);
    ptx::pdl_wait();

    uint4 raw[kSteps][2];
    load_run<T>(p, row, first * kGroup, count, t, raw);
    float inv_rms = 0.0f;
    if constexpr (kNorm) {
        if (p.inv_rms != nullptr) {
            if (row < p.rows) inv_rms = p.inv_rms[row];
        } else {
            float* const squares = in_shared(places.squares);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const float sum = squares_of_group<T>(raw[i]);
                if (t == 0) squares[(first + i) * kRowsOfBlock + quad] = sum;
            }
            __syncthreads();
            inv_rms = inverse_rms<kRowsOfBlock>(squares + quad, groups, t, p.eps);
            if (row >= p.rows) inv_rms = 0.0f;
        }
    }
    if (kNorm || p.inv_smooth != nullptr) ptx::mbarrier_wait(base + kNormBarrier, 0);
    float v[kSteps][16], largest = 0.0f, of_mine = 0.0f;
    transform_run<T, kNorm, grid>(p, base + places.norm + first * kGroup * 2, base + places.smooth + first * kGroup * 4,
                                  plan.scales.ceiling, count, t, inv_rms, raw, v, largest, of_mine);
    if constexpr (grid != Grid::kGroups16) {
        if (grid == Grid::kTokens8) largest = max_over_quad(largest);
        if (t == 0) in_shared(places.absmax)[warp * kRowsOfBlock + quad] = largest;
    }
    if (tiles > 0) {
        ptx::mbarrier_wait(base + kDownBarrier, 0);
        const uint32_t down = base + places.down + first * tiles * kFragmentBytes + lane * 16;
        float4* const partial = reinterpret_cast<float4*>(in_shared(places.partial)) + warp * tiles * kWarp + lane;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            float sum[4];
            multiply_down<T>(v, down + tile * kFragmentBytes, tiles * kFragmentBytes, count, sum);
            partial[tile * kWarp] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
    }
    __syncthreads();

    const WgmmaOutput output{p, gridDim.x * static_cast<uint32_t>(kRowsOfBlock)};
    if constexpr (grid != Grid::kGroups16) {
        largest = 0.0f;
        const float* const all = in_shared(places.absmax) + quad;
#pragma unroll 4
        for (int i = t; i < warps; i += 4) largest = ptx::max_nan(largest, all[i * kRowsOfBlock]);
        largest = max_over_quad(largest);
    }
    store_run<grid>(output, plan.scales, row_tile, slot, row, first, groups, quad, t, largest, of_mine, v);

#pragma unroll 1
    for (int tile = warps - 1 - warp; tile < tiles; tile += warps) {
        const auto* const from = reinterpret_cast<const float4*>(in_shared(places.partial)) + tile * kWarp + lane;
        float total[4] = {};
#pragma unroll 1
        for (int run = 0; run < warps; run += kTreeRuns) {
            const float4 sum = sum_in_tree<kTreeRuns>(min(kTreeRuns, warps - run),
                                                      [&](int i) { return from[(run + i) * tiles * kWarp]; });
            add(total, {sum.x, sum.y, sum.z, sum.w});
        }
        output.template store_lora<T>(row_tile, tile * kTileUnits + half * kWarp + lane, true, total);
    }
}

}  // namespace omniw4::quantize::sm90a
