"""Measures whether gradients underflow without a loss scale: of the weights, or those from `autograd.grad`, such as of a
gradient penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...isolation.tensors import plain_torch
from ...numerics.entries import all_finite, entries, over_tensors
from .forked import call_forked

SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4)
"""Loss scales to compare with, the first of which overflows nothing. Powers of two round nothing, except where numbers are
subnormal."""
LOST = 0.01
"""Part of the gradients from which these count as lost."""

Run = Callable[[Any], Sequence[torch.Tensor | None]]
"""Returns the gradients of the inputs from those of the outputs, and keeps the graph."""


def lost_without_scale(run: Run, gradients: Any) -> float:
    """The part of the gradients of the inputs that is lost without a loss scale: relative L2 difference from those at one.

    gradients: of the outputs. The passes run in a forked process, so that hooks of the user's are not called more often.
    """
    error: float = call_forked(lambda tell: _error_without_scale(run, gradients))
    return error


def _error_without_scale(run: Run, gradients: Any) -> float:
    """Relative L2 difference of the gradients from those at a loss scale; 0.0 if every scale overflows."""
    plain = _flat(run(gradients))
    for scale in SCALES:
        scaled = _flat(run(_multiplied(gradients, scale)))
        if all_finite(scaled):
            return _relative(plain, scaled / scale)
    return 0.0


def _multiplied(gradients: Any, scale: float) -> Any:
    return over_tensors(lambda x: x * scale, gradients)


def _flat(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """All entries of the gradients, in FP64."""
    with plain_torch():
        known = [entries(x.detach()).flatten().double() for x in gradients if x is not None]
        return torch.cat(known) if known else torch.zeros(0).double()


def _relative(plain: torch.Tensor, exact: torch.Tensor) -> float:
    with plain_torch():
        size = float(exact.norm())
        difference = float((plain - exact).norm())
    if not size or not math.isfinite(difference):
        return 0.0
    return difference / size
