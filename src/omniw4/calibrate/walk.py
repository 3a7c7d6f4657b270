"""Running a backbone one block at a time, so that memory holds one block's work and its inputs.

The backbone's own forward does everything around the blocks (embeddings, masks, rotary tables), whatever the
architecture: for block *i* it is called once a batch, with the blocks before *i* passing their input on, block *i*
fed with the hidden states kept from its predecessor, and the forward abandoned after it.

    walk = BlockWalk(model, source, batch_size=4)
    walk.probe()
    for index in range(len(walk)):
        walk.run(index, on_batch=..., advance=False)   # look at the inputs of the block's linears
        ...                                            # a caller may quantize the block in place here
        walk.run(index)                                # its outputs become the next block's inputs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from omniw4.errors import ModelError
from omniw4.model import find_backbone, find_blocks, find_linears
from omniw4.products import linear


@dataclass(frozen=True)
class Batch:
    """Keyword arguments of the backbone, which of their tokens count, and how many hold NaN or inf and so do not."""

    inputs: dict[str, Any]
    mask: torch.Tensor  # [B, L] bool
    excluded: int = 0


Resident = Callable[[int], AbstractContextManager[None]]


class Source(Protocol):
    """Calibration data that can be asked for any stretch of its samples."""

    def __len__(self) -> int: ...

    def batch(self, start: int, stop: int, backbone: nn.Module) -> Batch: ...


@dataclass(frozen=True)
class Group:
    """Linears of one block that read the same tensor, and so share their statistics. The first gives the name."""

    name: str
    members: tuple[str, ...]
    in_features: int


class _Stop(Exception):
    """Ends a forward of the backbone after the block of interest."""


class BlockWalk:
    """Walks a model's blocks in order, keeping only the hidden states that the next block reads.

    Args:
        model: any model whose blocks :func:`omniw4.model.find_blocks` finds.
        source: tokens or captured hidden states.
        batch_size: samples a forward.
        resident: makes a block ready while it is run: brings its weights into memory where they are not
            (:class:`omniw4.model.StreamedModel`), or changes what it makes of its inputs.
        samples: those to walk with; all of them without it.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        batch_size: int = 1,
        resident: Resident | None = None,
        samples: range | None = None,
    ) -> None:
        self.backbone = find_backbone(model)[1]
        self.blocks = find_blocks(model)
        self.resident: Resident = resident or (lambda index: nullcontext())
        self._source = source
        mine = samples or range(len(source))
        self._ranges = [(i, min(i + batch_size, mine.stop)) for i in range(mine.start, mine.stop, batch_size)]
        self._hidden: list[torch.Tensor | None] = [None] * len(self._ranges)  # inputs of the block at _position
        self._lost: list[torch.Tensor | None] = [None] * len(self._ranges)  # [B, L] bool: rows that held NaN or inf
        self._position = 0
        self._returns_tuple = False

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def probe(self) -> list[list[Group]]:
        """One ordinary forward of the first sample: which linears share an input, and can the model be walked.

        Returns:
            For each block its groups, in the order in which the linears are called; a linear that is not called
            (an expert without tokens) comes last, on its own.

        Raises:
            ModelError: something happens between the blocks, or is handed from one to the next, that a walk would
                miss; or a block was not run.
        """
        groups: list[list[Group]] = []
        previous: list[torch.Tensor] = []

        def run_block(index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            path, block = self.blocks[index]
            hidden = _hidden_of(args, kwargs, path)
            if previous and not (hidden is previous[0] or torch.equal(hidden, previous[0])):
                raise ModelError(f"hidden states change between {self.blocks[index - 1][0]} and {path}", hint=_WHY)
            with self.resident(index), _recording_inputs(block, path) as calls:
                output = original(*args, **kwargs)
            groups.append(_group(calls, block, path))
            self._returns_tuple = isinstance(output, tuple)
            if self._returns_tuple and any(isinstance(extra, torch.Tensor) for extra in output[1:]):
                raise ModelError(f"{path} hands more than hidden states to the next block", hint=_WHY)
            previous[:] = [output[0] if self._returns_tuple else output]
            return output

        with _patched(self.blocks, run_block):
            self._forward(self._source.batch(0, 1, self.backbone))
        if len(groups) < len(self.blocks):
            raise ModelError(f"{self.blocks[len(groups)][0]} is never run by {type(self.backbone).__name__}")
        return groups

    @torch.no_grad()
    def run(self, index: int, on_batch: Callable[[Batch], None] | None = None, *, advance: bool = True) -> None:
        """Run block ``index``, whose weights are in memory, on every batch.

        A row of its input that holds NaN or inf becomes zero, so that attention cannot spread it over the sample,
        and is not counted in this block and the later ones.

        Args:
            on_batch: called before the block sees a batch, so that hooks on its linears know the mask.
            advance: the block's outputs replace its inputs, and the next block is ``index + 1``; False leaves the
                walk where it is.

        Raises:
            ModelError: ``index`` is not the next block.
        """
        if index != self._position:
            raise ModelError(f"block {index} is out of turn, next is block {self._position}")
        kept: list[torch.Tensor] = []

        def run_block(i: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            path = self.blocks[i][0]
            hidden = _hidden_of(args, kwargs, path)
            if i < index:
                return (hidden,) if self._returns_tuple else hidden
            stored = self._hidden[number]
            hidden, lost = _without_non_finite(hidden if stored is None else stored, self._lost[number])
            if on_batch is not None:
                on_batch(batch if lost is None else _without_lost(batch, lost))
            args, kwargs = _with_hidden(args, kwargs, hidden)
            output = original(*args, **kwargs)
            kept.append(output[0] if isinstance(output, tuple) else output)
            if advance:
                self._lost[number] = lost
            raise _Stop

        with _patched(self.blocks, run_block), _quick_linears(self.blocks[index][1]):
            for number, (start, stop) in enumerate(self._ranges):
                kept.clear()
                batch = self._source.batch(start, stop, self.backbone)
                self._forward(batch)
                if advance:
                    self._hidden[number] = kept[0]
        self._position += advance

    def _forward(self, batch: Batch) -> None:
        inputs = dict(batch.inputs)
        parameters = inspect.signature(self.backbone.forward).parameters
        if "use_cache" in parameters:
            inputs["use_cache"] = False
        lacking = [
            name
            for name, one in parameters.items()
            if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and name not in inputs
        ]
        if lacking:
            raise ModelError(
                f"{type(self.backbone).__name__} cannot be run on {', '.join(inputs)} alone, it wants {lacking[0]}",
                hint=_WHY,
            )
        with suppress(_Stop):
            self.backbone(**inputs)


_WHY = "calibration runs one block after another, which such a model does not allow"


@contextmanager
def _patched(
    blocks: Sequence[tuple[str, nn.Module]], run_block: Callable[[int, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Route every block's forward through ``run_block(index, original, args, kwargs)``."""

    def route(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run_block(index, original, args, kwargs)

    saved = [block.__dict__.get("forward") for _, block in blocks]
    try:
        for index, (_, block) in enumerate(blocks):
            block.forward = route(index, block.forward)  # type: ignore[method-assign]
        yield
    finally:
        for (_, block), forward in zip(blocks, saved, strict=True):
            if forward is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = forward  # type: ignore[method-assign]


@contextmanager
def _quick_linears(block: nn.Module) -> Iterator[None]:
    """The block's linears by the fastest product there is (:mod:`omniw4.products`); hooks on them stay."""
    plain = [module for module in block.modules() if type(module) is nn.Linear and "forward" not in module.__dict__]

    def route(module: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: linear(x, module.weight, module.bias)

    try:
        for module in plain:
            module.forward = route(module)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for module in plain:
            module.__dict__.pop("forward", None)


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> torch.Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise ModelError(f"{path} takes no hidden states as its first argument", hint=_WHY)
    return hidden


def _without_non_finite(hidden: torch.Tensor, lost: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Hidden states ``[B, L, H]`` with zeros for rows that are not finite, and the rows lost so far (None: none)."""
    bad = ~hidden.isfinite().all(-1)
    if not bool(bad.any()):
        return hidden, lost
    return hidden.masked_fill(bad[..., None], 0.0), bad if lost is None else bad | lost


def _without_lost(batch: Batch, lost: torch.Tensor) -> Batch:
    return replace(batch, mask=batch.mask & ~lost, excluded=int((batch.mask & lost).sum()))


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


@contextmanager
def _recording_inputs(block: nn.Module, path: str) -> Iterator[dict[str, torch.Tensor]]:
    """Input tensor of each of the block's linears at its first call; the references keep identities apart."""
    calls: dict[str, torch.Tensor] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            calls.setdefault(name, args[0])

        return hook

    handles = [
        linear.register_forward_pre_hook(record(f"{path}.{name}")) for name, linear in find_linears(block).items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _group(calls: dict[str, torch.Tensor], block: nn.Module, path: str) -> list[Group]:
    members: dict[int, list[str]] = {}
    for name, x in calls.items():
        members.setdefault(id(x), []).append(name)
    linears = {f"{path}.{name}": linear for name, linear in find_linears(block).items()}
    alone = [[name] for name in linears if name not in calls]
    return [Group(names[0], tuple(names), linears[names[0]].in_features) for names in [*members.values(), *alone]]
