"""A forward, with its backward where there are gradients to make, as one CUDA graph.

A step of a small model is some twenty thousand kernels, which take several times as long to launch as to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from omniw4.cuda_graph import capture

if TYPE_CHECKING:
    from omniw4.distill.trainer import Example

WARM_UP = 2  # calls before the capture: libraries choose their kernels and allocate their workspaces


class GraphedLoss:
    """``loss(example)`` for examples of one shape, replayed.

    Args:
        loss: what is captured; it must not wait for the GPU.
        example: as all later ones are, but for what their tensors hold.
        parameters: whose ``.grad`` each call adds ``share`` times the loss's gradients to; none: no backward.
        share: weight of the loss in the gradients.
    """

    def __init__(
        self,
        loss: Callable[[Example], torch.Tensor],
        example: Example,
        parameters: Iterable[torch.nn.Parameter] = (),
        share: float = 1.0,
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in example.inputs.items()}
        self._example = replace(example, inputs=inputs)
        self._parameters, self._share = list(parameters), share
        for parameter in self._parameters:  # the graph adds to these very tensors
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        kept = [p.grad.clone() for p in self._parameters if p.grad is not None]
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._run(loss)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with capture(self._graph):
                self._result = self._run(loss)
        finally:  # also where it cannot be captured: what warming up has added is no gradient of the step
            for parameter, before in zip(self._parameters, kept, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(before)

    def __call__(self, example: Example) -> torch.Tensor:
        """The loss, in a tensor that the next call overwrites."""
        for name, static in self._example.inputs.items():
            if isinstance(static, torch.Tensor):
                static.copy_(example.inputs[name], non_blocking=True)
        self._graph.replay()
        return self._result

    def _run(self, loss: Callable[[Example], torch.Tensor]) -> torch.Tensor:
        with torch.set_grad_enabled(bool(self._parameters)):
            result = loss(self._example)
            if self._parameters:
                (result * self._share).backward()
        return result.detach()
