"""The cache beside a checkpoint: its key, what it refuses, what it leaves behind, and what it costs."""

import json
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from linear_samples import assert_same, assert_same_linear, random_linear
from safetensors import safe_open
from safetensors.torch import save_file

from omniw4 import repack
from omniw4.errors import LayoutError, StorageError
from omniw4.repack import cache, layouts
from omniw4.tensors import LinearSpec, QuantizedLinear

HASH = "0123456789abcdef" * 4
LAYOUTS = sorted(repack.LAYOUTS)


class FakeCheckpoint:
    """What the cache needs of a checkpoint; counts how many linears are alive at once."""

    def __init__(self, linears: dict[str, QuantizedLinear], hash: str = HASH) -> None:
        self.hash = hash
        self.specs = {path: linear.spec for path, linear in linears.items()}
        self.most_alive = 0
        self._linears = linears
        self._alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def linear(self, path: str) -> QuantizedLinear:
        linear = self._linears[path]
        copy = replace(linear, **{name: tensor.clone() for name, tensor in linear.tensors().items()})
        self._alive.add(copy.qweight)
        self.most_alive = max(self.most_alive, len(self._alive))
        return copy

    def check_hashes(self) -> None:
        """Its bytes are those it was made of."""


def some_linears() -> dict[str, QuantizedLinear]:
    return {
        "model.layers.0.q_proj": random_linear(24, 64, 8, seed=1),
        "model.layers.0.down_proj": random_linear(136, 192, 0, seed=2, smooth=False, bias=False),
        "model.layers.1.q_proj": random_linear(64, 128, 16, seed=3, dtype=torch.bfloat16),
    }


@pytest.fixture
def checkpoint() -> FakeCheckpoint:
    return FakeCheckpoint(some_linears())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_gives_back_the_checkpoint(tmp_path: Path, checkpoint: FakeCheckpoint, layout: str) -> None:
    report = cache.write(tmp_path, checkpoint, layout)
    assert (
        report.file
        == tmp_path / ".omniw4-cache" / f"{layout}-v{repack.get(layout).VERSION}-0123456789abcdef.safetensors"
    )
    assert (report.linears, report.skipped, report.reused) == (3, {}, False)
    assert report.bytes == report.file.stat().st_size
    with cache.Cache.open(tmp_path, checkpoint, layout) as opened:
        assert opened.paths == list(checkpoint.specs)
        for path in opened.paths:
            wanted = repack.get(layout).pack(checkpoint.linear(path))
            found = opened.linear(path)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert_same(found[name], tensor, f"{path}.{name}")
            assert_same_linear(opened.unpack(path), checkpoint.linear(path))


def test_file_is_ordinary_safetensors(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    file = cache.write(tmp_path, checkpoint, "mma_s4").file
    with safe_open(file, framework="pt") as opened:
        assert "model.layers.0.q_proj.qweight" in opened.keys()  # noqa: SIM118
        assert opened.metadata()["checkpoint"] == HASH


def test_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (cache.write(tmp_path / n, FakeCheckpoint(some_linears()), "wgmma_s8").file for n in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_valid_cache_is_reused_and_overwritten_on_demand(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    first = cache.write(tmp_path, checkpoint, "mma_s8")
    inode = first.file.stat().st_ino
    assert cache.write(tmp_path, checkpoint, "mma_s8") == replace(first, reused=True)
    assert first.file.stat().st_ino == inode
    assert not cache.write(tmp_path, checkpoint, "mma_s8", overwrite=True).reused
    assert first.file.stat().st_ino != inode


def test_progress_counts_linears(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    seen: list[tuple[int, int, str]] = []
    cache.write(tmp_path, checkpoint, "mma_s4", on_progress=lambda *args: seen.append(args))
    assert seen == [(i, 3, path) for i, path in enumerate(checkpoint.specs, 1)]


def test_one_linear_is_in_memory_at_a_time(tmp_path: Path) -> None:
    linears = {f"layers.{i}": random_linear(128, 128, 16, seed=i) for i in range(12)}
    checkpoint = FakeCheckpoint(linears)
    cache.write(tmp_path, checkpoint, "mma_s4")
    assert checkpoint.most_alive == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linears_the_kernels_cannot_run_are_named_and_left_out(tmp_path: Path, layout: str) -> None:
    linears = some_linears()
    linears["model.layers.1.down_proj"] = random_linear(64, 64, 0, act_bits=16, smooth=False)
    checkpoint = FakeCheckpoint(linears)
    report = cache.write(tmp_path, checkpoint, layout)
    assert list(report.skipped) == ["model.layers.1.down_proj"]
    assert cache.write(tmp_path, checkpoint, layout).skipped == report.skipped
    with (
        cache.Cache.open(tmp_path, checkpoint, layout) as opened,
        pytest.raises(LayoutError, match=r"no linear 'model.layers.1.down_proj': .*16 bits"),
    ):
        opened.linear("model.layers.1.down_proj")


def test_nothing_to_pack_is_said_and_leaves_no_file(tmp_path: Path) -> None:
    checkpoint = FakeCheckpoint({"a": random_linear(64, 64, 0, act_bits=8, smooth=False)})
    with pytest.raises(LayoutError, match=r"no linear of .* can run as mma_s4: .*8 bits"):
        cache.write(tmp_path, checkpoint, "mma_s4")
    assert cache.entries(tmp_path) == []


def test_a_linear_that_does_not_fit_is_named(tmp_path: Path) -> None:
    linears = some_linears()
    linears["model.layers.1.q_proj"].bias = torch.zeros(3)
    with pytest.raises(LayoutError, match=r"model.layers.1.q_proj: bias has shape \[3\], wanted \[64\]"):
        cache.write(tmp_path, FakeCheckpoint(linears), "mma_s4")
    assert cache.entries(tmp_path) == []


def test_unknown_layout_is_refused_with_the_names(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    with pytest.raises(LayoutError, match="no layout 'mma'") as e:
        cache.write(tmp_path, checkpoint, "mma")
    assert "wgmma_s8" in e.value.hint


def test_a_missing_cache_says_how_to_make_it(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    with pytest.raises(LayoutError, match="no cache") as e:
        cache.Cache.open(tmp_path, checkpoint, "mma_s4")
    assert "omniw4 repack" in e.value.hint
    assert "--layout mma_s4" in e.value.hint


def move_to(tmp_path: Path, report: cache.Report, layout: str, hash: str) -> None:
    report.file.rename(cache.cache_file(tmp_path, layout, hash))


def test_cache_of_another_checkpoint_is_refused(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    other = FakeCheckpoint(some_linears(), hash=HASH[:16] + "f" * 48)  # the names agree, the hashes do not
    cache.write(tmp_path, other, "mma_s4")
    with pytest.raises(LayoutError, match=f"is for checkpoint '{other.hash}', wanted '{HASH}'") as e:
        cache.Cache.open(tmp_path, checkpoint, "mma_s4")
    assert "--overwrite" in e.value.hint
    assert not cache.write(tmp_path, checkpoint, "mma_s4").reused
    cache.Cache.open(tmp_path, checkpoint, "mma_s4").close()


def test_cache_of_another_layout_is_refused(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    move_to(tmp_path, cache.write(tmp_path, checkpoint, "mma_s8"), "wgmma_s8", HASH)
    with pytest.raises(LayoutError, match="is for layout 'mma_s8', wanted 'wgmma_s8'"):
        cache.Cache.open(tmp_path, checkpoint, "wgmma_s8")


def test_cache_of_another_version_is_stale(
    tmp_path: Path, checkpoint: FakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = cache.write(tmp_path, checkpoint, "mma_s8")
    monkeypatch.setattr(layouts.mma_s8, "VERSION", 2)
    with pytest.raises(LayoutError, match="no cache"):
        cache.Cache.open(tmp_path, checkpoint, "mma_s8")
    move_to(tmp_path, old, "mma_s8", HASH)
    with pytest.raises(LayoutError, match="is for version '1', wanted '2'"):
        cache.Cache.open(tmp_path, checkpoint, "mma_s8")


@pytest.mark.parametrize("change", ["rank", "added", "removed"])
def test_cache_of_other_specs_is_refused(tmp_path: Path, checkpoint: FakeCheckpoint, change: str) -> None:
    cache.write(tmp_path, checkpoint, "mma_s4")
    if change == "rank":
        checkpoint.specs["model.layers.0.q_proj"] = LinearSpec(rank=4, smooth=True)
    elif change == "added":
        checkpoint.specs["model.layers.0.q_proj.new"] = LinearSpec()
    else:
        del checkpoint.specs["model.layers.0.q_proj"]
    with pytest.raises(LayoutError, match=r"holds 'model.layers.0.q_proj"):
        cache.Cache.open(tmp_path, checkpoint, "mma_s4")


def rewrite(file: Path, *, drop: str = "", add: str = "", metadata: dict[str, str | None] | None = None) -> None:
    """The same file with a tensor left out or added, or other metadata."""
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys() if name != drop}  # noqa: SIM118
        merged = {**opened.metadata(), **(metadata or {})}
    if add:
        tensors[add] = torch.zeros(1)
    save_file(tensors, file, {key: value for key, value in merged.items() if value is not None})


def first_linear_as(file: Path, **changes: object) -> dict[str, str | None]:
    with safe_open(file, framework="pt") as opened:
        linears = json.loads(opened.metadata()["linears"])
    linears["model.layers.0.q_proj"].update(changes)
    return {"linears": json.dumps(linears)}


@pytest.mark.parametrize("damage", ["empty", "truncated", "longer", "garbage", "foreign", "other json", "bad dtype"])
def test_a_damaged_file_is_named_and_replaced(tmp_path: Path, checkpoint: FakeCheckpoint, damage: str) -> None:
    file = cache.write(tmp_path, checkpoint, "mma_s4").file
    good = file.read_bytes()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "truncated":
        file.write_bytes(good[:-1])
    elif damage == "longer":
        file.write_bytes(good + b"\0")
    elif damage == "garbage":
        file.write_bytes(os.urandom(4096))
    elif damage == "foreign":
        save_file({"a": torch.zeros(3)}, file)
    elif damage == "other json":
        rewrite(file, metadata={"linears": "[1]"})
    else:
        rewrite(file, metadata=first_linear_as(file, dtypes={"qweight": "uint8", "w_scales": "load"}))
    with pytest.raises(LayoutError, match=str(file)) as e:
        cache.Cache.open(tmp_path, checkpoint, "mma_s4")
    assert "omniw4 repack" in e.value.hint
    assert not cache.write(tmp_path, checkpoint, "mma_s4").reused
    assert file.read_bytes() == good


def test_missing_and_foreign_tensors_are_named(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    file = cache.write(tmp_path, checkpoint, "mma_s4").file
    rewrite(file, drop="model.layers.0.q_proj.bias")
    with pytest.raises(LayoutError, match=r"lacks tensor 'model.layers.0.q_proj.bias'"):
        cache.Cache.open(tmp_path, checkpoint, "mma_s4")
    rewrite(cache.write(tmp_path, checkpoint, "mma_s4").file, add="model.layers.9.bias")
    with pytest.raises(LayoutError, match=r"has a foreign tensor 'model.layers.9.bias'"):
        cache.Cache.open(tmp_path, checkpoint, "mma_s4")


def test_tensors_of_other_shapes_than_the_header_says_are_refused(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    file = cache.write(tmp_path, checkpoint, "mma_s4").file
    rewrite(file, metadata=first_linear_as(file, out_features=200))
    with (
        cache.Cache.open(tmp_path, checkpoint, "mma_s4") as opened,
        pytest.raises(LayoutError, match=r"model.layers.0.q_proj.qweight has shape"),
    ):
        opened.linear("model.layers.0.q_proj")


def test_linears_that_are_not_in_it_as_they_are_packed_are_named(tmp_path: Path) -> None:
    """A flipped bit, another shape, and -0 for 0, each in a linear of its own; the fourth is whole."""
    linears = {**some_linears(), "model.layers.1.down_proj": random_linear(64, 64, 8, seed=4)}
    linears["model.layers.1.q_proj"].bias[0] = 0  # type: ignore[index]
    checkpoint = FakeCheckpoint(linears)
    file = cache.write(tmp_path, checkpoint, "mma_s8").file
    assert cache.damaged(tmp_path, checkpoint, "mma_s8") == []
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors["model.layers.0.q_proj.qweight"].view(-1)[-1] ^= 1
    tensors["model.layers.0.down_proj.qweight"] = tensors["model.layers.0.down_proj.qweight"][:-1].contiguous()
    tensors["model.layers.1.q_proj.bias"][0] = -0.0
    save_file(tensors, file, metadata)
    wanted = ["model.layers.0.q_proj", "model.layers.0.down_proj", "model.layers.1.q_proj"]
    assert cache.damaged(tmp_path, checkpoint, "mma_s8") == wanted


def test_stale_entries_are_listed_and_deleted_and_nothing_else(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    kept = [cache.write(tmp_path, checkpoint, layout).file for layout in ("mma_s4", "mma_s8")]
    folder = tmp_path / ".omniw4-cache"
    other_hash = folder / f"mma_s4-v1-{'e' * 16}.safetensors"
    other_version = folder / f"mma_s4-v0-{HASH[:16]}.safetensors"
    other_layout = folder / f"mma_s5-v1-{HASH[:16]}.safetensors"
    for file in (other_hash, other_version, other_layout):
        file.write_bytes(b"x")
    notes = folder / "notes-v1.safetensors"
    notes.write_bytes(b"y")
    assert {entry.file for entry in cache.entries(tmp_path)} == {*kept, other_hash, other_version, other_layout}
    assert {entry.file for entry in cache.stale(tmp_path, HASH)} == {other_hash, other_version, other_layout}
    assert {entry.file for entry in cache.delete_stale(tmp_path, HASH)} == {other_hash, other_version, other_layout}
    assert set(folder.iterdir()) == {*kept, notes}
    assert cache.delete_stale(tmp_path, HASH) == []


def test_what_somebody_else_deleted_meanwhile_is_gone_as_well(
    tmp_path: Path, checkpoint: FakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".omniw4-cache"
    folder.mkdir()
    old = folder / f"mma_s4-v0-{HASH[:16]}.safetensors"
    leftovers = [folder / f".{name}.omniw4-tmp" for name in "xy"]
    unlink = Path.unlink

    def unlink_twice(self: Path, missing_ok: bool = False) -> None:
        unlink(self)
        unlink(self, missing_ok=missing_ok)

    for file in (old, *leftovers):
        file.write_bytes(b"x")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink_twice)
        assert [entry.file for entry in cache.delete_stale(tmp_path, HASH)] == [old]
        cache.write(tmp_path, checkpoint, "mma_s4")
    assert not old.exists()
    assert not any(leftover.exists() for leftover in leftovers)


def test_a_checkpoint_without_a_cache_has_no_entries(tmp_path: Path) -> None:
    assert cache.entries(tmp_path) == []
    assert cache.delete_stale(tmp_path, HASH) == []


def test_a_failure_midway_leaves_the_old_file_and_no_other(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    file = cache.write(tmp_path, checkpoint, "mma_s4").file
    good = file.read_bytes()

    def interrupt(done: int, total: int, path: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.write(tmp_path, checkpoint, "mma_s4", overwrite=True, on_progress=interrupt)
    assert file.read_bytes() == good
    assert list(file.parent.iterdir()) == [file]


KILLED = """
import os, signal, sys
from pathlib import Path
from test_repack_cache import FakeCheckpoint, some_linears
from omniw4.repack import cache
cache.write(Path(sys.argv[1]), FakeCheckpoint(some_linears()), "mma_s4",
            on_progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_writer_leaves_nothing_that_a_later_one_accepts(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    assert result.returncode == -9
    folder = tmp_path / ".omniw4-cache"
    assert len(list(folder.iterdir())) == 1  # what the killed process was writing
    assert cache.entries(tmp_path) == []
    report = cache.write(tmp_path, checkpoint, "mma_s4")
    assert not report.reused
    assert list(folder.iterdir()) == [report.file]


def test_writers_at_the_same_time_take_turns(tmp_path: Path) -> None:
    reports: list[cache.Report] = []
    threads = [
        threading.Thread(target=lambda: reports.append(cache.write(tmp_path, FakeCheckpoint(some_linears()), "mma_s4")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.reused for report in reports) == [False, True, True, True]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    (tmp_path / ".omniw4-cache").write_text("a file in the way")
    with pytest.raises(StorageError, match="omniw4-cache"):
        cache.write(tmp_path, checkpoint, "mma_s4")
    with pytest.raises(StorageError, match="cannot create"):
        cache.write(tmp_path / "absent", checkpoint, "mma_s4")


def test_ensure_makes_the_cache_once(tmp_path: Path, checkpoint: FakeCheckpoint) -> None:
    with cache.ensure(tmp_path, checkpoint, "wgmma_s8") as made:
        inode = made.file.stat().st_ino
    with cache.ensure(tmp_path, checkpoint, "wgmma_s8") as found:
        assert found.file.stat().st_ino == inode
        assert_same_linear(found.unpack("model.layers.0.q_proj"), checkpoint.linear("model.layers.0.q_proj"))
