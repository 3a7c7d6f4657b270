// Host side of quantize_lora_down in layout wgmma_s8: which cut, and the launch.
#pragma once

#include "../common/launch.h"
#include "../common/launch_pdl.h"
#include "quantize_lora_down_sm90a.cuh"
#include "whole_rows_sm90a.cuh"

#include <algorithm>

namespace omniw4::quantize::sm90a {

constexpr int kMaxGroups = 512;  // of a row
constexpr int kOfOneGpc = 16;    // multiprocessors, at least, that can hold a cluster together

// Number of a cut, and groups a block owns: none where blocks take whole rows.
struct Choice {
    int cut, groups;
};

// What the choice needs to know of a cut.
struct Figures {
    int steps, registers, max_threads;
    bool loops;
};

template <class Cut>
constexpr Figures figures_of() {
    return {Cut::kSteps, Cut::kRegisters, Cut::kMaxThreads, Cut::kLoops};
}

// Of clusters first, then of whole rows.
enum CutNumber { kOne, kTwo, kFour, kMany, kRowsOne, kRowsTwo, kRowsFour, kCuts };
constexpr Figures kFigures[kCuts] = {figures_of<One>(),     figures_of<Two>(),     figures_of<Four>(),
                                     figures_of<Many>(),    figures_of<RowsOne>(), figures_of<RowsTwo>(),
                                     figures_of<RowsFour>()};

inline int blocks_of(int padded_groups, const Choice& choice) {
    return static_cast<int>(ceil_div(padded_groups, choice.groups));
}

inline int threads_of(const Choice& choice) {
    return choice.groups / kFigures[choice.cut].steps * 2 * kWarp;
}

// Clusters that run at a time.
inline int clusters_at_once(int padded_groups, const Choice& choice, int multiprocessors) {
    constexpr int kRegisters = 65536;
    const int blocks = std::min(kRegisters / (kFigures[choice.cut].registers * threads_of(choice)), 32);
    const int gpcs = std::max(1, multiprocessors / kOfOneGpc), in_gpc = std::min(kOfOneGpc, multiprocessors);
    return std::max(1, gpcs * (in_gpc * blocks / blocks_of(padded_groups, choice)));
}

// Messages between blocks are illegal in a launch without clusters, to the block itself too: there are at least two.
constexpr int kLeastCluster = 2;

// Blocks a multiprocessor, in halves, up to which rows are spread over more blocks, of one group a warp; and up to which
// a warp holds one group where a block has the eight of one sum. Measured on an H200.
constexpr int kSpreadHalves = 1, kOneHalves = 4;

inline int warps_of_rows(int cut, int padded_groups) {
    return static_cast<int>(ceil_div(padded_groups, kFigures[cut].steps));
}

// Whether blocks of whole rows suit: their number fills the multiprocessors once, or nearly. Of one row of 1024 columns
// and few ranks there is little to do, so that clusters are as quick; with 48 ranks they are not. Measured at 16, 32, 48
// and 64 groups; more ranks do not fit beside longer rows.
inline bool rows_suit(int cut, int row_tiles, int rank, int multiprocessors, int padded_groups) {
    constexpr int kRegisters = 65536, kShared = 227 * 1024;
    const int threads = warps_of_rows(cut, padded_groups) * kWarp, blocks = 2 * row_tiles;
    if (threads > kFigures[cut].max_threads) return false;
    const bool wide = padded_groups > 16;
    if (wide ? rank > kRowTile : rank < 3 * kRowTile) return false;
    const int shared = padded_groups * (rank / kRowTile) * (kFragmentBytes + kWarp * 16) + padded_groups * kGroup * 6;
    if (shared > kMostShared) return false;
    const int at_once = multiprocessors * std::min(kRegisters / (kFigures[cut].registers * threads), kShared / shared);
    return blocks <= at_once && blocks > (wide ? at_once * 3 / 4 : at_once / 4);
}

// Whether two blocks a cluster suit: few ranks (more do not fit beside half of K), and rows that fill the multiprocessors
// once, which smaller blocks in larger clusters do unevenly. Measured at 32 groups.
inline bool pairs_suit(int row_tiles, int rank, int multiprocessors, int padded_groups, const Choice& pair) {
    if (rank > kRowTile || pair.groups != 16) return false;
    const int at_once = clusters_at_once(padded_groups, pair, multiprocessors);
    return row_tiles > at_once * 3 / 4 && row_tiles <= at_once;
}

// A warp holds more groups where that lets all of the rows run at a time, or where K asks for it.
inline Choice choose(int row_tiles, int rank, int padded_groups, int multiprocessors) {
    const int rows = padded_groups <= 16 ? kRowsOne : padded_groups > 32 && padded_groups <= 48 ? kRowsTwo : kRowsFour;
    if (rows_suit(rows, row_tiles, rank, multiprocessors, padded_groups)) return {rows, 0};
    const Choice pair{kTwo, padded_groups / 2};
    if (pairs_suit(row_tiles, rank, multiprocessors, padded_groups, pair)) return pair;
    const auto fits = [&](const Choice& choice) { return blocks_of(padded_groups, choice) <= kPortableCluster; };
    const auto halves = [&](const Choice& choice) {
        return 2 * row_tiles * blocks_of(padded_groups, choice) / multiprocessors;
    };
    for (const int groups : {1, 2, 4, 8}) {
        const Choice one{kOne, groups};
        if (blocks_of(padded_groups, {kOne, 2 * groups}) < kLeastCluster && groups < 8) return one;
        if (fits(one) && halves(one) < (groups < 8 ? kSpreadHalves : kOneHalves)) return one;
    }
    for (const int groups : {8, 16}) {
        const Choice two{kTwo, groups}, many{kMany, groups};
        if (!fits(two)) continue;
        const bool small = blocks_of(padded_groups, two) <= kLeastCluster;  // larger clusters wait for one another
        return small && row_tiles > 2 * clusters_at_once(padded_groups, two, multiprocessors) ? many : two;
    }
    const int groups = static_cast<int>(round_up(ceil_div(padded_groups, kPortableCluster), kTree));
    return {kFour, std::min(groups, kMostGroups)};
}

inline Scales scales_for(const QuantizeLoraDownParams& p, Grid grid) {
    constexpr int kBelow16Bits = 30000;  // codes of values below `limit` are
    const double qmax = grid == Grid::kTokens8 ? 127 : 7;
    const double span = grid == Grid::kGroupsInteger ? qmax * kIntegerScaleMax : qmax;
    Scales scales{static_cast<float>(p.clip / span), static_cast<float>(p.clip / qmax), 0.0f,
                  p.rotate ? 0x1p125f : INFINITY};
    // A code is at most qmax / clip, half as much again where its integer was rounded down; FP16 scales end at 65504.
    if (2 * qmax / p.clip < kBelow16Bits) {
        scales.limit = grid == Grid::kGroupsInteger ? 0x1p125f : static_cast<float>(60000 * qmax / p.clip);
    }
    return scales;
}

inline Plan plan_for(const QuantizeLoraDownParams& p, Grid grid, const Choice& choice) {
    Plan plan{};
    plan.scales = scales_for(p, grid);
    const int padded = static_cast<int>(round_up(p.cols / kGroup, 2)), steps = kFigures[choice.cut].steps;
    const int runs = choice.groups / steps;
    const int node = std::min(choice.groups & -choice.groups, kTree);
    plan.row_tiles = static_cast<int>(ceil_div(p.rows, kRowTile));
    plan.cluster = blocks_of(padded, choice);
    plan.groups = choice.groups;
    plan.nodes = choice.groups / node;
    plan.all_nodes = plan.cluster * plan.nodes;
    plan.node_runs = node / steps;
    plan.entry_nodes = kTree / node;
    const bool rms_inside = p.norm_weight != nullptr && p.inv_rms == nullptr;
    const int most = choice.cut == kFour ? kMostShared : kMostShared / 2;
    for (plan.tiles = std::min(p.rank / kRowTile, 4);; --plan.tiles) {
        const int units = plan.tiles * kTileUnits;
        plan.share_shift = 3;  // lanes four apart work together
        while (plan.cluster << plan.share_shift < units) ++plan.share_shift;
        plan.share = 1 << plan.share_shift;
        Places& places = plan.places;
        int end = kVariable;
        const auto take = [&](int bytes) { return std::exchange(end, end + bytes); };
        places.absmax = take(2 * plan.cluster * kRowTile * 4);
        places.staged = take(rms_inside ? plan.groups * kRowTile * 4 : 0);
        places.squares = take(rms_inside ? 2 * plan.cluster * plan.groups * kRowTile * 4 : 0);
        places.down = take(plan.groups * plan.tiles * kFragmentBytes);
        places.norm = take(p.norm_weight != nullptr ? plan.groups * kGroup * 2 : 0);
        places.smooth = take(p.inv_smooth != nullptr ? plan.groups * kGroup * 4 : 0);
        places.partial = take(runs * units * 16);
        places.sums = take(p.rank > 0 ? 2 * plan.all_nodes * plan.share * 16 : 0);
        places.bytes = end;
        if (end <= most || plan.tiles <= 1) return plan;
    }
}

template <class T, class Scaled, bool kNorm, class Cut>
Status launch(const QuantizeLoraDownParams& p, const Choice& choice, int multiprocessors, cudaStream_t stream) {
    constexpr auto kernel = quantize_lora_down_kernel<T, Scaled, kNorm, Cut>;
    const Plan plan = plan_for(p, Scaled::kGrid, choice);
    if (plan.places.bytes > kMostShared) return Status::kBadShape;
    if (const Status status = allow_shared_memory<kernel>(kMostShared); status != Status::kOk) return status;
    if (plan.cluster > kPortableCluster && !allow_large_clusters(kernel)) return Status::kLaunchFailed;
    int clusters = plan.row_tiles;
    if constexpr (Cut::kLoops) {  // as many row tiles to each as to the next
        const int padded = static_cast<int>(round_up(p.cols / kGroup, 2));
        const int64_t turns = ceil_div(plan.row_tiles, clusters_at_once(padded, choice, multiprocessors));
        clusters = static_cast<int>(ceil_div(plan.row_tiles, turns));
    }
    const int passes = p.rank > 0 ? static_cast<int>(ceil_div(p.rank / kRowTile, plan.tiles)) : 1;
    const dim3 blocks(static_cast<unsigned>(clusters * plan.cluster), static_cast<unsigned>(passes));
    return launch_early_clusters(kernel, blocks, plan.cluster, threads_of(choice), plan.places.bytes, stream, p, plan);
}

template <class T, class Scaled, class Cut>
Status launch_cut(const QuantizeLoraDownParams& p, const Choice& choice, int multiprocessors, cudaStream_t stream) {
    return p.norm_weight != nullptr ? launch<T, Scaled, true, Cut>(p, choice, multiprocessors, stream)
                                    : launch<T, Scaled, false, Cut>(p, choice, multiprocessors, stream);
}

inline RowPlan plan_for_rows(const QuantizeLoraDownParams& p, Grid grid, int cut, int warps) {
    RowPlan plan{};
    plan.scales = scales_for(p, grid);
    const int steps = kFigures[cut].steps, tiles = p.rank / kRowTile;
    int end = kBehindBarriers;
    const auto take = [&](int bytes) { return std::exchange(end, end + bytes); };
    plan.places.absmax = take(warps * kRowsOfBlock * 4);
    plan.places.squares = take(p.norm_weight != nullptr && p.inv_rms == nullptr ? warps * steps * kRowsOfBlock * 4 : 0);
    plan.places.down = take(p.cols / kGroup * tiles * kFragmentBytes);
    plan.places.norm = take(p.norm_weight != nullptr ? p.cols * 2 : 0);
    plan.places.smooth = take(p.inv_smooth != nullptr ? p.cols * 4 : 0);
    plan.places.partial = take(warps * tiles * kWarp * 16);
    plan.places.bytes = end;
    return plan;
}

template <class T, class Scaled, bool kNorm, class Cut>
Status launch_rows(const QuantizeLoraDownParams& p, const RowPlan& plan, int threads, cudaStream_t stream) {
    constexpr auto kernel = quantize_rows_kernel<T, Scaled, kNorm, Cut>;
    if (const Status status = allow_shared_memory<kernel>(kMostShared); status != Status::kOk) return status;
    const dim3 blocks(static_cast<unsigned>(ceil_div(p.rows, kRowTile)) * 2);
    return launch_early(kernel, blocks, threads, plan.places.bytes, stream, p, plan);
}

template <class T, class Scaled>
Status launch_rows(const QuantizeLoraDownParams& p, int cut, int padded_groups, cudaStream_t stream) {
    const int warps = warps_of_rows(cut, padded_groups), threads = warps * kWarp;
    const RowPlan plan = plan_for_rows(p, Scaled::kGrid, cut, warps);
    if (plan.places.bytes > kMostShared || threads > kFigures[cut].max_threads) return Status::kBadShape;
    const auto launch_cut = [&](auto of) {
        using Cut = decltype(of);
        return p.norm_weight != nullptr ? launch_rows<T, Scaled, true, Cut>(p, plan, threads, stream)
                                        : launch_rows<T, Scaled, false, Cut>(p, plan, threads, stream);
    };
    switch (cut) {
        case kRowsOne: return launch_cut(RowsOne{});
        case kRowsTwo: return launch_cut(RowsTwo{});
        default: return launch_cut(RowsFour{});
    }
}

template <class T, class Scaled>
Status launch_grid(const QuantizeLoraDownParams& p, cudaStream_t stream) {
    const int groups = p.cols / kGroup, padded = static_cast<int>(round_up(groups, 2));
    if (groups > kMaxGroups) return Status::kBadShape;
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        return Status::kLaunchFailed;
    }
    const int row_tiles = static_cast<int>(ceil_div(p.rows, kRowTile));
    const Choice choice =
        p.cut == 0 ? choose(row_tiles, p.rank, padded, multiprocessors) : Choice{p.cut / 64 - 1, p.cut % 64};
    if (choice.cut >= kRowsOne && choice.cut < kCuts && choice.groups == 0) {
        return launch_rows<T, Scaled>(p, choice.cut, padded, stream);
    }
    if (choice.cut < 0 || choice.cut >= kRowsOne || choice.groups <= 0 || choice.groups > kMostGroups ||
        choice.groups % kFigures[choice.cut].steps != 0 || threads_of(choice) > kFigures[choice.cut].max_threads ||
        blocks_of(padded, choice) > kMaxCluster || blocks_of(padded, choice) < kLeastCluster) {
        return Status::kBadShape;
    }
    switch (choice.cut) {
        case kOne: return launch_cut<T, Scaled, One>(p, choice, multiprocessors, stream);
        case kTwo: return launch_cut<T, Scaled, Two>(p, choice, multiprocessors, stream);
        case kFour: return launch_cut<T, Scaled, Four>(p, choice, multiprocessors, stream);
        default: return launch_cut<T, Scaled, Many>(p, choice, multiprocessors, stream);
    }
}

template <class T, class Scaled>
struct Kernels {
    template <bool kNorm, class Cut>
    static Registration entry() {
        return registered<quantize_lora_down_kernel<T, Scaled, kNorm, Cut>>(8 / Cut::kSteps * 2 * kWarp, 24 * 1024);
    }
    template <bool kNorm, class Cut>
    static Registration rows() {
        return registered<quantize_rows_kernel<T, Scaled, kNorm, Cut>>(16 / Cut::kSteps * kWarp, 48 * 1024);
    }
    Registration kernels[2 * kCuts] = {entry<false, One>(),     entry<true, One>(),     entry<false, Two>(),
                                       entry<true, Two>(),      entry<false, Four>(),   entry<true, Four>(),
                                       entry<false, Many>(),    entry<true, Many>(),    rows<false, RowsOne>(),
                                       rows<true, RowsOne>(),   rows<false, RowsTwo>(), rows<true, RowsTwo>(),
                                       rows<false, RowsFour>(), rows<true, RowsFour>()};
};

}  // namespace omniw4::quantize::sm90a
