"""Time every tile of the wgmma_s8 GEMM with integer scales, and write the table by which the kernels choose one.

Needs a GPU of compute capability 9.0, but not for ``--from``. Each tile runs at each shape over distinct weights,
replayed as one CUDA graph. The table holds three numbers a tile (kernels/gemm_lora_up/choose_integer_sm90a.h says how
they make a time), fitted to the medians; printed is how much slower the tile they choose is than the best one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
HEADER = ROOT / "kernels" / "gemm_lora_up" / "tuning_integer_sm90a.h"
TOKENS = (1, 16, 32, 64, 128, 192, 256, 384, 512, 704, 768, 1024, 1536, 2048, 4096)
# N, K of OmniVoice's linears, with q, k, v and gate, up stacked, and of Llama-8B's
WEIGHTS = (
    (4096, 1024), (2048, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (12288, 4096), (4096, 12288), (4096, 4096),
)  # fmt: skip
SLOWEST = 4.0  # times the best: tiles that lose by more teach nothing about a choice, and are left out of the fit
MOST_WAVES = 20  # more of them, and the tile is not timed
FEW = 0.02  # microseconds: the least a stage is taken to cost


@dataclass(frozen=True)
class Tile:
    number: int
    features: int
    tokens: int
    blocks: int
    splits: int
    cluster: int = 1

    @property
    def name(self) -> str:
        splits, cluster = f"x{self.splits}" * (self.splits > 1), f"c{self.cluster}" * (self.cluster > 1)
        return f"{self.features}x{self.tokens}{splits}{cluster}"

    def waves(self, m: int, n: int, multiprocessors: int) -> tuple[int, float | None]:
        """Whole waves of blocks or clusters, and how crowded multiprocessors are in the one that is left, from 0 to 1,
        if any."""
        tiles = -(-m // self.tokens) * -(-(-(-n // 128) * 128) // self.features)
        slots = multiprocessors * self.blocks // self.cluster
        whole, rest = divmod(tiles, slots)
        if rest == 0:
            return whole, None
        if self.blocks == 1:
            return whole, rest / slots
        return whole, (-(-rest * self.cluster // multiprocessors) - 1) / (self.blocks - 1)

    def stages(self, k: int) -> int:
        """Stages of 128 columns that a block multiplies."""
        stages = -(-k // 128)
        return -(-stages // self.cluster)


@dataclass(frozen=True)
class Cost:
    """Microseconds: of a wave whatever K, of a stage of 128 columns with all at work, of a stage with few."""

    wave: float
    stage: float
    stage_alone: float

    def time(self, tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
        whole, crowd = tile.waves(m, n, multiprocessors)
        stages = tile.stages(k)
        time = whole * (self.wave + stages * self.stage)
        if crowd is not None:
            time += self.wave + stages * (self.stage_alone + (self.stage - self.stage_alone) * crowd)
        return time


@dataclass(frozen=True)
class Sample:
    tile: int
    m: int
    n: int
    k: int
    us: float


def fit(tile: Tile, samples: list[Sample], multiprocessors: int) -> Cost:
    """Least squares of relative errors, no number below zero and no full stage cheaper than a lonely one."""
    rows, ones = [], []
    for s in samples:
        whole, crowd = tile.waves(s.m, s.n, multiprocessors)
        stages, last = tile.stages(s.k), 0 if crowd is None else 1
        full = whole + (crowd or 0.0)
        rows.append([(whole + last) / s.us, stages * full / s.us, stages * (whole + last - full) / s.us])
        ones.append(1.0)
    a, b = np.array(rows), np.array(ones)
    best, least = Cost(0.0, FEW, FEW), float("inf")
    for wave in np.linspace(0.0, 6.0, 61):
        solved = np.linalg.lstsq(a[:, 1:], b - a[:, 0] * wave, rcond=None)[0]
        alone = max(float(solved[1]), FEW)
        cost = Cost(float(wave), max(float(solved[0]), alone), alone)
        error = float(np.square(a @ np.array([cost.wave, cost.stage, cost.stage_alone]) - b).sum())
        if error < least:
            best, least = cost, error
    return best


class Bench:
    """One weight shape on a GPU, over distinct weights."""

    def __init__(self, n: int, k: int, device: Any) -> None:
        import torch

        from omniw4.bench.linear import distinct_weights

        self.n, self.k, self.device = n, k, device
        self.weights = []
        for _ in range(distinct_weights(device, n, k)):
            w = torch.randint(0, 256, (n // 64, k // 64, 2112), dtype=torch.uint8, device=device)
            w[..., 2048:] = w[..., 2048:] % 16 + 1
            self.weights.append(w)
        self.empty = torch.empty(n // 64, k // 64, 0, dtype=torch.uint8, device=device)
        self.rows = torch.full((n,), 1e-4, device=device)
        self.up = torch.randn(1, n // 16, 32, 8, device=device).half()

    def time(self, m: int, tiles: list[Tile], repetitions: int) -> dict[int, float]:
        """Median microseconds of each tile."""
        import torch

        from omniw4.bench.timing import measure as time_calls
        from omniw4.ops import gemm_wgmma_s8

        padded = -(-m // 16) * 16
        x = torch.randint(-128, 128, (self.k // 128, padded, 128), dtype=torch.int8, device=self.device)
        scales = torch.full((padded,), 1e-3, device=self.device)
        act = torch.randn(1, padded // 8, 2, 8, 8, device=self.device).half()

        def call(w: torch.Tensor, tile: int) -> torch.Tensor:
            return gemm_wgmma_s8.gemm(
                "tune", x, scales, w, self.empty, act, self.up, None, None, m, self.n, 8, "plain", torch.float16,
                tile, self.rows,
            )  # fmt: skip

        times = {}
        for tile in tiles:
            calls = [partial(call, w, tile.number) for w in self.weights]
            timing = time_calls(calls, self.device, warmup=1, repetitions=repetitions)
            times[tile.number] = statistics.median(timing.samples)
        return times


def measure(repetitions: int) -> dict[str, object]:
    import torch

    from omniw4.ops import extension

    device = torch.device("cuda", 0)
    tiles = [Tile(i, *sizes) for i, sizes in enumerate(extension.loaded(device).integer_tiles(), start=1)]
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    samples = []
    for n, k in WEIGHTS:
        bench = Bench(n, k, device)
        for m in TOKENS:
            near = [t for t in tiles if t.waves(m, n, multiprocessors)[0] <= MOST_WAVES]
            times = bench.time(m, near, repetitions)
            samples += [Sample(number, m, n, k, us) for number, us in times.items()]
            best = min(near, key=lambda t: times[t.number])
            shown = " ".join(f"{t.name}:{times[t.number]:.1f}" for t in near)
            tops = 2 * m * n * k / times[best.number] * 1e-6
            print(f"{m:5d} {n:6d} {k:6d}  {best.name} {tops:5.0f} TOPS  {shown}", flush=True)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "multiprocessors": multiprocessors,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tiles": [asdict(t) for t in tiles],
        "samples": [asdict(s) for s in samples],
    }


def regret(tiles: list[Tile], costs: dict[int, Cost], samples: list[Sample], multiprocessors: int) -> list[str]:
    """A line for each shape where the tile chosen is more than 3 % slower than the best."""
    lines, ratios = [], []
    shapes = dict.fromkeys((s.m, s.n, s.k) for s in samples)
    for m, n, k in shapes:
        times = {s.tile: s.us for s in samples if (s.m, s.n, s.k) == (m, n, k)}
        timed = [t for t in tiles if t.number in times]
        chosen = min(timed, key=lambda t: costs[t.number].time(t, m, n, k, multiprocessors)).number
        best = min(times, key=lambda number: times[number])
        ratios.append(times[chosen] / times[best])
        if ratios[-1] > 1.03:
            lines.append(
                f"M {m} N {n} K {k}: tile {chosen} takes {times[chosen]:.2f} us, tile {best} {times[best]:.2f}"
            )
    lines.append(f"chosen over best, geometric mean of {len(ratios)} shapes: {statistics.geometric_mean(ratios):.4f}")
    return lines


def header(tiles: list[Tile], costs: dict[int, Cost], origin: str) -> str:
    rows = "\n".join(
        f"    {{TileChoice::k{t.name}, {t.features}, {t.tokens}, {t.blocks}, {t.splits}, {t.cluster}, "
        f"{costs[t.number].wave:.3f}, {costs[t.number].stage:.4f}, {costs[t.number].stage_alone:.4f}}},"
        for t in tiles
    )
    return f"""// Made by scripts/tune.py; measured on: {origin}.
#pragma once

#include "integer_tile_sm90a.h"

namespace omniw4::gemm::sm90a::integer {{

// Microseconds: of a wave of blocks whatever K, of a stage with all multiprocessors at work, of a stage with few.
struct TileCost {{
    TileChoice choice;
    int features, tokens, blocks, splits, cluster;
    double wave, stage, stage_alone;
}};
// clang-format off
constexpr TileCost kCosts[] = {{
{rows}
}};
// clang-format on

}}  // namespace omniw4::gemm::sm90a::integer
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--from", dest="source", type=Path, help="fit these measurements instead of making new ones")
    parser.add_argument("--header", type=Path, default=HEADER, help="where the table goes")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    found = json.loads(args.source.read_text(encoding="utf-8")) if args.source else measure(args.repetitions)
    if args.json:
        args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    tiles, samples = [Tile(**t) for t in found["tiles"]], [Sample(**s) for s in found["samples"]]
    multiprocessors = int(found["multiprocessors"])
    best: dict[tuple[int, int, int], float] = {}
    for s in samples:
        best[s.m, s.n, s.k] = min(s.us, best.get((s.m, s.n, s.k), s.us))
    near = [s for s in samples if s.us <= SLOWEST * best[s.m, s.n, s.k]]
    costs = {t.number: fit(t, [s for s in near if s.tile == t.number], multiprocessors) for t in tiles}
    print("\n".join(regret(tiles, costs, samples, multiprocessors)))
    origin = f"{found['gpu']}, CUDA {found['cuda']}"
    args.header.write_text(header(tiles, costs, origin), encoding="utf-8")
    print(f"Wrote {args.header}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
