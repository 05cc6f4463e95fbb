"""A run for the sake of its dtypes: what is expensive gives zeros, of the shape and dtype that it would have."""

from __future__ import annotations

from typing import Any

import torch

from ..numerics.kernels import is_tensor_core
from ..numerics.nodes import operation_of
from ..trees import over_tensors
from .imitation import Imitation
from .regions import Region

_BATCH_FIRST = 8
"""Position of that argument, in all recurrent layers."""


class Outlines(Imitation):
    """Runs operations as Imitation does, but for matrix products and recurrent layers.

    Good for models whose Python reads no values, or none that come from these.
    """

    def __init__(self, lenient: bool = False, most: int | None = None) -> None:
        super().__init__(lenient, most)
        self._known: dict[tuple[Any, str], Any] = {}

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The operation, or zeros in the place of its result."""
        if operation_of(op).recurrent and op._overloadname == "input":
            return _recurrent(op, args)
        if not is_tensor_core(op):
            return super().part(op, args, kwargs, region)
        device = args[0].device
        outline = over_tensors(lambda x: (x.shape, x.stride(), x.dtype), (args, kwargs))
        result = self._known.get(key := (op, str(outline)))
        if result is None:
            result = self._known[key] = op(*over_tensors(_outline, args), **over_tensors(_outline, kwargs))
        return over_tensors(lambda x: _zeros(x, device), result)


def _recurrent(op: Any, args: tuple[Any, ...]) -> Any:
    """A recurrent layer by its first step: [t, b, i] -> [t, b, o], or [b, t, i] -> [b, t, o]."""
    time = int(bool(args[_BATCH_FIRST]) and args[0].dim() == 3)
    result, *states = op(args[0].narrow(time, 0, 1), *args[1:])
    return (torch.cat([result] * args[0].shape[time], time), *states)


def _zeros(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`torch.zeros_like(x, device=device)`, which is slow for tensors without entries."""
    if not x.is_contiguous():
        return torch.zeros_like(x, device=device)
    return torch.zeros(x.shape, dtype=x.dtype, device=device)


def _outline(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
