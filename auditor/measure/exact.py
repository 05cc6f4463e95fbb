"""An operation in FP32 on inputs that were rounded: the exact result beside the low one, of some entries or of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..formats.entries import entries, is_plain
from ..ops.casting import raised
from ..ops.nodes import operation_of, settled, tensors_of
from .batchnorm import has_statistics

_SAMPLE, _RUN = 1 << 14, 1 << 7
"""Entries of a sample, and how many of them are neighbours: single entries far apart take longer to read."""


@dataclass(frozen=True)
class Exact:
    """`target(*args, **kwargs)` with half-precision arguments raised to FP32.

    Where an entry of the result depends on a few entries of the arguments only, a sample takes a fraction of the time,
    and the whole is computed if it is asked for.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def whole(self) -> Any:
        """The result, with all its entries."""
        return self._run(self.args, self.kwargs)

    @cached_property
    def steps(self) -> tuple[int, ...] | None:
        """Every how many entries a sample takes one, per dimension of the result; None where only the whole can be had."""
        tensors = tensors_of((self.args, self.kwargs))
        shapes = [x.shape for x in tensors]
        if not shapes or not all(map(is_plain, tensors)):
            return None
        if _pointwise(self.target):
            return _thinned(np.broadcast_shapes(*shapes), kept=())
        kept = _kept(self.target, self.args)
        return None if kept is None else _thinned(shapes[0], kept)

    def prepare(self) -> None:
        """Compute the whole now if no sample can be had; whatever the operation raises comes from here."""
        if self.steps is None:
            _ = self.whole

    def sample(self, low: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(exact, low) per tensor of the low result, some 16,000 entries of each at most if entries stand alone."""
        theirs = tensors_of(low)
        if self.steps is None:
            return [(sampled(e), sampled(x)) for e, x in zip(tensors_of(self.whole), theirs, strict=True)]
        if _pointwise(self.target):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._cut, (self.args, self.kwargs))
        else:
            args, kwargs = (self._cut(self.args[0]), *self.args[1:]), self.kwargs
        ours = tensors_of(self._run(args, kwargs))
        return [(e, self._cut(x) if x.shape != e.shape else x) for e, x in zip(ours, theirs, strict=True)]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return settled(self.target, self.target(*raised(args), **raised(kwargs)))

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        """Every so many entries of a tensor that broadcasts with the result."""
        steps = (self.steps or ())[-x.dim() :] if x.dim() else ()
        return x[tuple(slice(None, None, 1 if size == 1 else step) for size, step in zip(x.shape, steps, strict=True))]


def sampled(x: torch.Tensor) -> torch.Tensor:
    """Some 16,000 entries of `x` at most, as real numbers, in runs of neighbours that are evenly spread."""
    flat = entries(x).reshape(-1)
    runs = _SAMPLE // _RUN
    width = flat.numel() // runs
    return flat if width <= _RUN else flat[: runs * width].view(runs, width)[:, :_RUN]


def _pointwise(target: Callable[..., Any]) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _kept(target: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[int] | None:
    """Dimensions of the first argument, and of a result of its shape, whose entries an entry of the result depends on.

    None where that is not known.
    """
    dims = range(args[0].dim() if isinstance(args[0], torch.Tensor) else 0)
    how = operation_of(target).normalises
    if how == "statistics":
        return (1,) if has_statistics(target, args) else None  # an entry reads the statistics of its channel
    if how == "trailing":
        return dims[-len(args[1]) :]
    if how == "dim":
        return (args[1] % len(dims),) if dims else None
    return dims[1:] if how == "sample" else None


def _thinned(shape: Sequence[int], kept: Sequence[int]) -> tuple[int, ...] | None:
    """Steps that leave about _SAMPLE entries, taken from the longest dimensions, the last one when others are used up."""
    steps, left = [1] * len(shape), list(shape)
    free = [dim for dim in range(len(shape)) if dim not in kept]
    while math.prod(left) > _SAMPLE:
        longest = max(free, key=lambda dim: (left[dim] > 1 and dim < len(shape) - 1, left[dim]), default=None)
        if longest is None or left[longest] == 1:
            break
        steps[longest] *= 2
        left[longest] = -(-shape[longest] // steps[longest])
    return tuple(steps) if math.prod(shape) > 2 * math.prod(left) else None
