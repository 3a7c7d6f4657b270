// quantize_lora_down in layout wgmma_s8: one read of the rows, all of K in the registers of a cluster.
//
// A cluster takes the sixteen rows of a row tile; its blocks share out K, and so do the warps of a block, in groups of
// 64. A warp has eight of the rows, a quad of lanes a row, so that all of a warp has one group and the low-rank product is
// mma.m16n8k16 with 16 ranks as rows and the eight tokens as columns: what a lane holds of x' is operand B as it is,
// operand A is proj_down in fragment order, from shared memory. A token's scale is known only when its last group is:
// blocks send each other the largest of their part, and x' stays in registers until all of them are there.
//
// Whatever the cut, a row's bits are the same: squares and low-rank products are summed within each group first, then
// over groups in an order of their own: the products in a tree over eight groups, and these one after the other; the
// squares in four chains.
#pragma once

#include "../ptx/pdl.cuh"
#include "exchange_sm90a.cuh"
#include "run_sm90a.cuh"

namespace omniw4::quantize::sm90a {

template <class T, class Scaled, bool kNorm, class Cut>
__global__ void __launch_bounds__(Cut::kMaxThreads) __maxnreg__(Cut::kRegisters)
    quantize_lora_down_kernel(const __grid_constant__ QuantizeLoraDownParams p, const __grid_constant__ Plan plan) {
    constexpr int kSteps = Cut::kSteps;
    constexpr Grid grid = Scaled::kGrid;
    extern __shared__ __align__(16) float shared[];
    ptx::pdl_launch_dependents();
    const Place at;
    const int lane = at.lane, warp = at.warp, warps = blockDim.x / kWarp, t = at.t, half = at.half, run = at.run;
    const int slot = at.slot;
    const int groups = static_cast<uint32_t>(p.cols) / kGroup, first_tile = blockIdx.y * plan.tiles;
    const int tiles = min(plan.tiles, static_cast<int>(static_cast<uint32_t>(p.rank) / kRowTile) - first_tile),
              units = tiles * kTileUnits;
    const Exchange<Cut::kLoops> exchange{plan, ptx::shared_address(shared), ptx::cluster_rank()};
    const int first = exchange.rank * plan.groups + run * kSteps, count = min(kSteps, groups - first);
    const auto my_units = [&] { return min(plan.share, units - exchange.rank * plan.share); };  // not above 0: none
    const bool rms_inside = kNorm && p.inv_rms == nullptr;
    const auto bytes = [&](Message message) {  // that this block gets for a row tile
        switch (message) {
            case Message::kSquares: return rms_inside ? plan.cluster * plan.groups * kRowTile * 4 : 0;
            case Message::kAbsmax: return grid == Grid::kGroups16 ? 0 : plan.cluster * kRowTile * 4;
            default: return max(0, my_units()) * plan.all_nodes * 16;
        }
    };
    const auto in_shared = [&](int place) { return reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + place); };
    int row_tile = ptx::cluster_index();
    const int clusters = Cut::kLoops ? ptx::cluster_count() : 1;
    const auto further = [&](int turns) {  // whether there is a row tile so many turns later
        return Cut::kLoops && row_tile + turns * clusters < plan.row_tiles;
    };

    if (threadIdx.x == 0) exchange.begin(bytes, further(1));
    if (warp == 0) ptx::st_shared_b32(exchange.base + kBlockAbsmax + lane * 4, 0);
    __syncthreads();
    ptx::cluster_arrive_relaxed();
    if (!p.weights_ready) ptx::pdl_wait();
    if (warp == 0) copy_weights<T>(p, exchange.base, plan, exchange.rank, first_tile, tiles);
    ptx::pdl_wait();

    uint4 raw[kSteps][2];
    const auto load = [&](int of_row_tile) {
        const int64_t row = static_cast<int64_t>(of_row_tile) * kRowTile + at.token;
        load_run<T>(p, row, first * kGroup, count, t, raw);
    };
    load(row_tile);
    ptx::cluster_wait();  // from here on the others' barriers are there

    int iteration = 0;
    do {
        const int turn = iteration % 2;
        const int64_t row = static_cast<int64_t>(row_tile) * kRowTile + at.token;
        float inv_rms = 0.0f;
        if (kNorm && p.inv_rms != nullptr && row < p.rows) inv_rms = p.inv_rms[row];
        if (rms_inside) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const float sum = squares_of_group<T>(raw[i]);
                if (t == 0) in_shared(plan.places.staged)[(run * kSteps + i) * kRowTile + slot] = sum;
            }
            __syncthreads();
            const int all = plan.cluster * plan.groups * kRowTile * 4;
            if (static_cast<int>(threadIdx.x) < plan.groups * 4) {
                const int part = exchange.rank * plan.groups * 4 + threadIdx.x;
                const float4 four = reinterpret_cast<const float4*>(in_shared(plan.places.staged))[threadIdx.x];
#pragma unroll 1
                for (int to = 0; to < plan.cluster; ++to) {
                    exchange.send(to, Message::kSquares, turn, plan.places.squares + turn * all + part * 16, four);
                }
            }
            exchange.wait(Message::kSquares, iteration, bytes, further(2));
            inv_rms = inverse_rms<kRowTile>(in_shared(plan.places.squares + turn * all) + slot, groups, t, p.eps);
            if (row >= p.rows) inv_rms = 0.0f;
        }

        if ((kNorm || p.inv_smooth != nullptr) && iteration == 0) ptx::mbarrier_wait(exchange.base + kBarriers, 0);
        float v[kSteps][16], largest = 0.0f, of_mine = 0.0f;  // absmax of all steps, and of step t % kSteps
        const int in_block = run * kSteps * kGroup;
        transform_run<T, kNorm, grid>(p, exchange.base + plan.places.norm + in_block * 2,
                                      exchange.base + plan.places.smooth + in_block * 4, plan.scales.ceiling, count, t,
                                      inv_rms, raw, v, largest, of_mine);
        if (further(1)) load(row_tile + clusters);
        if constexpr (grid != Grid::kGroups16) {
            if (grid == Grid::kTokens8) largest = max_over_quad(largest);
            const uint32_t mine = exchange.base + kBlockAbsmax + turn * kRowTile * 4;
            if (t == 0) ptx::red_shared_max_u32(mine + slot * 4, __float_as_uint(largest));
            if (Cut::kLoops && warp == 0 && lane < kRowTile && iteration > 0) {  // all are done with the turn before
                ptx::st_shared_b32(exchange.base + kBlockAbsmax + (turn ^ 1) * kRowTile * 4 + lane * 4, 0);
            }
        }
        __syncthreads();
        if constexpr (grid != Grid::kGroups16) {
            if (warp * (kWarp / 4) < plan.cluster) {
                const int to = threadIdx.x / 4;
                const auto* mine = reinterpret_cast<const float4*>(in_shared(kBlockAbsmax + turn * kRowTile * 4));
                const int place = (turn * plan.cluster + exchange.rank) * kRowTile * 4 + t * 16;
                if (to < plan.cluster) exchange.send(to, Message::kAbsmax, turn, plan.places.absmax + place, mine[t]);
            }
        }

        if (tiles > 0) {
            if (iteration == 0) ptx::mbarrier_wait(exchange.base + kBarriers, 0);
            const uint32_t down = exchange.base + plan.places.down + run * kSteps * tiles * kFragmentBytes + lane * 16;
            float4* const partial = reinterpret_cast<float4*>(in_shared(plan.places.partial)) + lane;
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                float sum[4];
                multiply_down<T>(v, down + tile * kFragmentBytes, tiles * kFragmentBytes, count, sum);
                partial[run * units + tile * kTileUnits + half * kWarp] = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
            __syncthreads();
#pragma unroll 1
            for (int task = warp; task < plan.nodes * tiles * 2; task += warps) {
                int node = 0, begin = task * kWarp;
                for (; begin >= units; begin -= units) ++node;
                const float4* const from = partial + node * plan.node_runs * units + begin;
                const float4 sum = sum_in_tree(plan.node_runs, [&](int i) { return from[i * units]; });
                const int unit = begin + lane, to = unit >> plan.share_shift;
                const int slot_of_sum = (turn * plan.all_nodes + exchange.rank * plan.nodes + node) * plan.share +
                                        (unit & (plan.share - 1));
                exchange.send(to, Message::kSums, turn, plan.places.sums + slot_of_sum * 16, sum);
            }
        }

        const Place here;
        if constexpr (grid != Grid::kGroups16) {
            exchange.wait(Message::kAbsmax, iteration, bytes, further(2));
            largest = 0.0f;
            const float* all = in_shared(plan.places.absmax) + turn * plan.cluster * kRowTile + here.slot;
#pragma unroll 1
            for (int i = here.t; i < plan.cluster; i += 4) largest = ptx::max_nan(largest, all[i * kRowTile]);
            largest = max_over_quad(largest);
        }
        if (blockIdx.y == 0) {
            const int first_group = exchange.rank * plan.groups + here.run * kSteps;
            const int64_t here_row = static_cast<int64_t>(row_tile) * kRowTile + here.token;
            const WgmmaOutput output{p, static_cast<uint32_t>(plan.row_tiles) * kRowTile};
            store_run<grid>(output, plan.scales, row_tile, here.slot, here_row, first_group, groups, here.quad, here.t,
                            largest, of_mine, v);
        }

        if (tiles > 0) {
#pragma unroll 1
            for (int begin = here.warp * kWarp; begin < my_units(); begin += warps * kWarp) {
                if (begin == here.warp * kWarp) exchange.wait(Message::kSums, iteration, bytes, further(2));
                const int unit = exchange.rank * plan.share + begin + lane;
                const bool there = begin + lane < my_units();
                const auto* const from = reinterpret_cast<const float4*>(in_shared(plan.places.sums)) +
                                         turn * plan.all_nodes * plan.share + (there ? begin + lane : 0);
                float total[4] = {};
#pragma unroll 1
                for (int node = 0; node < plan.all_nodes; node += plan.entry_nodes) {
                    const float4 sum = sum_in_tree(min(plan.entry_nodes, plan.all_nodes - node),
                                                   [&](int i) { return from[(node + i) * plan.share]; });
                    add(total, {sum.x, sum.y, sum.z, sum.w});
                }
                const WgmmaOutput output{p, static_cast<uint32_t>(plan.row_tiles) * kRowTile};
                output.template store_lora<T>(row_tile, first_tile * kTileUnits + unit, there, total);
            }
        }
        row_tile += clusters;
        ++iteration;
    } while (further(0));
}

}  // namespace omniw4::quantize::sm90a
