"""Random operations draw in FP32 in any precision, so that a low-precision run gets the same numbers as FP32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..numerics.casting import widen
from ..numerics.devices import NATIVE
from ..numerics.entries import over_tensors
from ..numerics.formats import is_low
from ..numerics.nodes import mutates


@dataclass(frozen=True)
class Draw:
    """The generator state before a random operation. device: the device of the generator; own: whether the operation
    was called with a `generator` argument."""

    state: torch.Tensor
    device: torch.device
    own: bool

    def repeat(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Repeat the operation with the same random numbers; generators are unchanged."""
        if self.own:
            generator = torch.Generator(self.device)
            generator.set_state(self.state)
            return in_float32(op, args, {**kwargs, "generator": generator})
        with ExitStack() as stack:
            stack.callback(_set_state, self.device, state_of(self.device))
            _set_state(self.device, self.state)
            return in_float32(op, args, kwargs)


@cache
def may_draw(op: Any) -> bool:
    """Whether an operation can draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def draw_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    """The state of the generator that a random operation with these arguments uses."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        return Draw(generator.get_state(), generator.device, True)
    tensors = (x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    device = torch.device(kwargs.get("device") or next(tensors, "cpu"))
    return Draw(state_of(device), device, False)


def drew(draw: Draw, kwargs: dict[str, Any]) -> bool:
    """Whether an operation advanced its generator since `draw` was created."""
    now = kwargs["generator"].get_state() if draw.own else state_of(draw.device)
    return not torch.equal(now, draw.state)


def in_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with its low-precision arguments converted to FP32, and round FP32 results to the low dtype."""
    leaves = pytree.tree_leaves((args, kwargs))
    asked = next((x for x in leaves if isinstance(x, torch.dtype)), None)
    dtype = asked or next((x.dtype for x in leaves if isinstance(x, torch.Tensor) and is_low(x.dtype)), None)
    if dtype is None or not is_low(dtype):
        return op(*args, **kwargs)
    given = pytree.tree_map_only(torch.dtype, lambda asked: torch.float32 if is_low(asked) else asked, (args, kwargs))
    wide, named = widen(given)
    result = op(*wide, **named)
    if mutates(op):  # the caller's own tensor must be written
        args[0].copy_(wide[0])
        return args[0] if result is wide[0] else result
    return over_tensors(lambda x: x.to(dtype) if x.dtype is torch.float32 else x, result)


def state_of(device: torch.device) -> torch.Tensor:
    """State of a device's default generator."""
    if device.type not in NATIVE:
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type in NATIVE:
        torch.get_device_module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
