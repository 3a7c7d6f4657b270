"""A packed checkpoint beside the canonical one.

The file is ``<checkpoint>/.omniw4-cache/<layout>-v<version>-<hash16>.safetensors``. Its name's key (layout, version of
the layout, hash of the checkpoint) is the whole key: the file holds nothing that the checkpoint does not, and can be
deleted at any time. Its header repeats the key in full together with the spec of every linear, and :meth:`Cache.open`
refuses a file whose header says otherwise than the checkpoint it is to be used for. Tensors are named as on disk,
``<path>.qweight`` and so on, in the layout's order and padding.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from omniw4.errors import LayoutError
from omniw4.repack.cache_header import Header
from omniw4.repack.layouts import LAYOUTS, Layout, get, what_fits
from omniw4.repack.operands import check_dtype, check_shape
from omniw4.storage import TensorFileWriter, explain_os_errors
from omniw4.storage.files import TEMP_SUFFIX
from omniw4.tensors import LinearSpec, QuantizedLinear

FOLDER = ".omniw4-cache"
_FORMAT = "omniw4-cache-1"
_NAME = re.compile(r"(?P<layout>\w+)-v(?P<version>\d+)-(?P<key>[0-9a-f]{16})\.safetensors")


class Source(Protocol):
    """The checkpoint to pack; ``omniw4.checkpoint.Checkpoint`` is one."""

    @property
    def hash(self) -> str: ...

    @property
    def specs(self) -> Mapping[str, LinearSpec]: ...

    def linear(self, path: str) -> QuantizedLinear: ...

    def check_hashes(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    """One cache file, as its name describes it."""

    file: Path
    layout: str
    version: int
    key: str  # first 16 digits of the checkpoint's hash
    bytes: int


@dataclass(frozen=True)
class Report:
    """What :func:`write` did."""

    file: Path
    layout: str
    version: int
    linears: int
    bytes: int
    skipped: dict[str, str]  # path -> why no kernel of this layout runs it
    reused: bool  # the file was there already


def cache_file(folder: str | Path, layout: str, checkpoint_hash: str) -> Path:
    """Where the cache of a checkpoint in ``folder`` lies; raises LayoutError for an unknown layout."""
    return Path(folder) / FOLDER / f"{layout}-v{get(layout).VERSION}-{checkpoint_hash[:16]}.safetensors"


def entries(folder: str | Path) -> list[Entry]:
    """All cache files beside the checkpoint in ``folder``, by name; files of other names are not ours."""
    found = []
    with explain_os_errors("list", Path(folder) / FOLDER):
        for file in sorted((Path(folder) / FOLDER).glob("*.safetensors")):
            if match := _NAME.fullmatch(file.name):
                found.append(Entry(file, match["layout"], int(match["version"]), match["key"], file.stat().st_size))
    return found


def stale(folder: str | Path, checkpoint_hash: str) -> list[Entry]:
    """The entries that can no longer be used: of an unknown layout, of another version of a layout, or made when the
    checkpoint had another hash."""
    current = {cache_file(folder, name, checkpoint_hash).name for name in LAYOUTS}
    return [entry for entry in entries(folder) if entry.file.name not in current]


def delete_stale(folder: str | Path, checkpoint_hash: str) -> list[Entry]:
    """Delete the :func:`stale` entries and say which; raises StorageError."""
    removed = stale(folder, checkpoint_hash)
    for entry in removed:
        with explain_os_errors("delete", entry.file):
            entry.file.unlink(missing_ok=True)
    return removed


def write(
    folder: str | Path,
    checkpoint: Source,
    layout: str,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Pack a checkpoint, one linear at a time, into its cache file.

    A valid cache that is there already is left alone; a damaged one is replaced. Processes that write the same
    checkpoint's cache take turns, the later ones finding the work done. Peak memory is a few times one linear's
    packed size.

    Args:
        folder: the checkpoint's folder.
        layout: name of the layout.
        overwrite: pack anew even when a valid cache is there.
        on_progress: called with (linears done, linears in all, path) after each.

    Raises:
        LayoutError: unknown layout, a linear whose tensors do not fit together, or none that the layout's kernels run.
        StorageError: the folder cannot be written, or the disk is full; nothing is left behind.
        CheckpointError: the checkpoint's bytes are not those that its hashes were taken of.
    """
    module, file = get(layout), cache_file(folder, layout, checkpoint.hash)
    if not overwrite and (report := _valid_report(folder, checkpoint, layout)):
        return report
    skipped = _skipped(checkpoint, module)
    paths = [path for path in checkpoint.specs if path not in skipped]
    if not paths:
        raise LayoutError(
            f"no linear of {str(folder)!r} can run as {layout}: {next(iter(skipped.values()), 'it holds none')}",
            hint=what_fits(checkpoint.specs.values()),
        )
    checkpoint.check_hashes()  # a cache outlives its checkpoint's damage, so none is made of damaged weights
    with explain_os_errors("create", file.parent):
        file.parent.mkdir(exist_ok=True)
    with _taking_turns(file.parent):
        if not overwrite and (report := _valid_report(folder, checkpoint, layout)):  # made while this one waited
            return report
        headers = {path: Header.of(path, checkpoint.linear(path)) for path in paths}
        tensors = {
            f"{path}.{name}": (tensor.dtype, tuple(tensor.shape))
            for path, header in headers.items()
            for name, tensor in header.packed(module).items()
        }
        metadata = {
            "format": _FORMAT,
            "layout": layout,
            "version": str(module.VERSION),
            "checkpoint": checkpoint.hash,
            "linears": json.dumps({path: header.to_dict() for path, header in headers.items()}),
        }
        with TensorFileWriter(file, tensors, metadata) as writer:
            for done, path in enumerate(paths, 1):
                for name, tensor in module.pack(checkpoint.linear(path)).items():
                    writer.write(f"{path}.{name}", tensor)
                if on_progress is not None:
                    on_progress(done, len(paths), path)
    return Report(file, layout, module.VERSION, len(paths), file.stat().st_size, skipped, reused=False)


class Cache:
    """An opened cache file, known to belong to its checkpoint; tensors are read when asked for."""

    def __init__(self, file: Path, layout: Layout, handle: Any, headers: dict[str, Header], skipped: dict[str, str]):
        self.file = file
        self.layout = layout
        self.skipped = skipped
        self._handle = handle
        self._headers = headers

    @classmethod
    def open(cls, folder: str | Path, checkpoint: Source, layout: str) -> Cache:
        """Open the cache of a checkpoint.

        Raises:
            LayoutError: there is none, it is damaged, or it belongs to another checkpoint, layout or version; the
                hint says how to make it anew.
        """
        module, file = get(layout), cache_file(folder, layout, checkpoint.hash)
        hint = f"make it with `omniw4 repack {folder} --layout {layout} --overwrite`"
        if not file.is_file():
            raise LayoutError(f"no cache {str(file)!r}", hint=hint.replace(" --overwrite", ""))
        try:
            handle = safe_open(file, framework="pt")
            metadata = handle.metadata() or {}
            headers = {path: Header.from_dict(d) for path, d in json.loads(metadata.get("linears", "{}")).items()}
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            size = file.stat().st_size
            raise LayoutError(f"cache {str(file)!r} of {size} bytes cannot be read: {e}", hint=hint) from e
        wanted = {
            "format": _FORMAT,
            "layout": layout,
            "version": str(module.VERSION),
            "checkpoint": checkpoint.hash,
        }
        for key, value in wanted.items():
            if metadata.get(key) != value:
                found = metadata.get(key)
                raise LayoutError(f"cache {str(file)!r} is for {key} {found!r}, wanted {value!r}", hint=hint)
        skipped = _skipped(checkpoint, module)
        for path in sorted({*checkpoint.specs, *headers}):
            found_spec = headers[path].spec if path in headers else None
            wanted_spec = None if path in skipped else checkpoint.specs.get(path)
            if found_spec != wanted_spec:
                raise LayoutError(
                    f"cache {str(file)!r} holds {path!r} as {found_spec}, wanted {wanted_spec}", hint=hint
                )
        names = {f"{path}.{name}" for path, header in headers.items() for name in header.dtypes}
        for what, differing in (("lacks", names - set(handle.keys())), ("has a foreign", set(handle.keys()) - names)):
            if differing:
                raise LayoutError(f"cache {str(file)!r} {what} tensor {min(differing)!r}", hint=hint)
        return cls(file, module, handle, headers, skipped)

    @property
    def paths(self) -> list[str]:
        return list(self._headers)

    def linear(self, path: str) -> dict[str, torch.Tensor]:
        """The packed tensors of one linear, by their names without the path.

        Raises:
            LayoutError: the layout's kernels do not run this linear, it is not in the cache, or its tensors have
                other shapes than its spec says.
        """
        header = self._header(path)
        wanted = header.packed(self.layout)
        tensors = {name: self._handle.get_tensor(f"{path}.{name}") for name in wanted}
        for name, tensor in tensors.items():
            check_shape(f"{path}.{name}", tensor, tuple(wanted[name].shape))
            check_dtype(f"{path}.{name}", tensor, wanted[name].dtype)
        return tensors

    def unpack(self, path: str) -> QuantizedLinear:
        """The canonical linear, bit for bit; raises LayoutError as :meth:`linear` does, or for non-zero padding."""
        header = self._header(path)
        return self.layout.unpack(self.linear(path), header.spec, header.out_features, header.in_features)

    def close(self) -> None:
        """Let go of the file."""
        self._handle = None

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _header(self, path: str) -> Header:
        if path not in self._headers:
            why = self.skipped.get(path, f"it holds {len(self._headers)} other linears")
            raise LayoutError(f"cache {str(self.file)!r} has no linear {path!r}: {why}")
        return self._headers[path]


def ensure(folder: str | Path, checkpoint: Source, layout: str) -> Cache:
    """The cache of a checkpoint, made first when it is missing or cannot be used; raises what :func:`write` does."""
    write(folder, checkpoint, layout)
    return Cache.open(folder, checkpoint, layout)


def damaged(folder: str | Path, checkpoint: Source, layout: str) -> list[str]:
    """Linears that the cache holds otherwise than they are packed, bit for bit; takes as long as packing them."""
    with Cache.open(folder, checkpoint, layout) as cache:
        return [path for path in cache.paths if not _same_bytes(cache, path, checkpoint.linear(path))]


def _same_bytes(cache: Cache, path: str, linear: QuantizedLinear) -> bool:
    try:
        found = cache.linear(path)
    except LayoutError:
        return False
    packed = cache.layout.pack(linear)
    return all(torch.equal(found[name].view(torch.uint8), packed[name].view(torch.uint8)) for name in packed)


def _skipped(checkpoint: Source, layout: Layout) -> dict[str, str]:
    """Linears that no kernel of the layout runs, and why: they stay canonical."""
    return {path: why for path, spec in checkpoint.specs.items() if (why := layout.unsupported(spec))}


def _valid_report(folder: str | Path, checkpoint: Source, layout: str) -> Report | None:
    """A report on the cache that is there, or None when there is none that can be used."""
    try:
        with Cache.open(folder, checkpoint, layout) as cache:
            size = cache.file.stat().st_size
            return Report(cache.file, layout, cache.layout.VERSION, len(cache.paths), size, cache.skipped, reused=True)
    except LayoutError:
        return None


@contextlib.contextmanager
def _taking_turns(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, waiting for it; leftovers of processes that died are swept while nobody can be writing.

    On a file system without locks the block runs all the same: writing is atomic, only the work may be done twice.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for leftover in folder.glob(f".*{TEMP_SUFFIX}"):
                leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)
