"""Measures whether gradients from `autograd.grad`, such as those of a gradient penalty, underflow without a loss scale."""

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
"""Relative L2 difference from the gradients at a loss scale from which gradients without one count as lost."""

Run = Callable[[Any], Sequence[torch.Tensor | None]]
"""Returns the gradients of the inputs from those of the outputs, and keeps the graph."""


def underflows(run: Run, gradients: Any) -> bool:
    """Whether gradients of the inputs are lost that a loss scale keeps. gradients: of the outputs.

    The passes run in a forked process, so that hooks of the user's are not called more often.
    """
    error: float = call_forked(lambda tell: _error_without_scale(run, gradients))
    return error > LOST


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
