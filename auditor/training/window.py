"""Usable loss scales for FP16 gradients, and the updates that BF16 weights lose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from ..numerics.formats import FORMATS
from ..numerics.histogram import (
    exponent_counts,
    largest_scale,
    merge_magnitudes,
    subnormal_share,
    underflow_share,
)
from ..records import Magnitudes
from ..records.training import LossScale, ParameterGradients

ALLOWED = 0.01
"""Share of the non-zero low gradients that may underflow to zero."""

HEADROOM = 16.0
"""Safety factor of the initial scale for growing gradients, where the window is that wide."""

_HIGHEST = 126
FP16 = FORMATS["fp16"]

RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Learning rates in the BF16 outlook."""

_HALF_SPACING = FORMATS["bf16"].mantissa + 1
_NEVER = 200
"""Ratio for zero weights: near zero BF16 represents any update."""


def loss_scale(low: Mapping[str, Magnitudes]) -> LossScale | None:
    """The window for low gradients, by module; None if there are none, or all are zero."""
    pool = merge_magnitudes(low.values())
    if not pool.nonzero:
        return None
    top = min(math.floor(math.log2(largest_scale(pool, FP16))), _HIGHEST)
    needed = next(k for k in range(min(0, top), _HIGHEST + 400) if underflow_share(pool.exponents, FP16, k) <= ALLOWED)
    largest = max(low, key=lambda module: low[module].max_abs)
    hungry = max(low, key=lambda module: count_underflows(low[module], top))
    open_ = needed <= top
    shifts = range(min(0, needed, top) - 4, max(needed, top) + 5)
    return LossScale(
        minimum=math.ldexp(1.0, needed),
        maximum=math.ldexp(1.0, top),
        init=max(math.ldexp(1.0, needed), math.ldexp(1.0, top) / HEADROOM) if open_ else None,
        flushed_unscaled=underflow_share(pool.exponents, FP16),
        allowed=ALLOWED,
        closed_by=None if open_ else largest,
        largest=largest,
        starved=hungry if count_underflows(low[hungry], top) else None,
        flushed={k: underflow_share(pool.exponents, FP16, k) for k in shifts},
        subnormal={k: subnormal_share(pool.exponents, FP16, k) for k in shifts},
    )


def count_underflows(magnitudes: Magnitudes, shift: int = 0) -> int:
    """The number of gradients that FP16 turns to zero at a loss scale of 2 ** shift."""
    return round(underflow_share(magnitudes.exponents, FP16, shift) * magnitudes.nonzero)


def scaler_code(init: float) -> str:
    """The initial GradScaler, as code; all arguments except the scale are torch's defaults."""
    return f"GradScaler(init_scale={init:.10g}, growth_factor=2, backoff_factor=0.5, growth_interval=2000)"


def ratios_of(weight: torch.Tensor, gradient: torch.Tensor) -> dict[int, int]:
    """{floor(log2(|g| / half the BF16 spacing at w)): count}, over the entries whose gradient is not zero."""
    w, g = weight.detach().float().reshape(-1), gradient.detach().float().reshape(-1)
    moved = torch.isfinite(g) & (g != 0)
    w, g = w[moved], g[moved]
    still = w == 0
    spacing = torch.ldexp(torch.ones_like(w), torch.frexp(w).exponent - 1 - _HALF_SPACING)
    counts = exponent_counts((g.abs() / spacing)[~still]) if bool((~still).any()) else {}
    return counts if not bool(still.any()) else {**counts, _NEVER: int(still.sum())}


def lost_by_sgd(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """Share of the non-zero updates `rate * gradient` that rounding to BF16 discards.

    Within the bin that contains the threshold, magnitudes are assumed uniform on the logarithmic scale.
    """
    edge = -math.log2(rate)
    lost, total = 0.0, 0
    for parameter in parameters:
        for ratio, count in parameter.ratios.items():
            lost += count * min(max(edge - ratio, 0.0), 1.0)
            total += count
    return lost / total if total else 0.0


def lost_by_adam(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """The same for Adam's first steps, which move every weight with a gradient by the learning rate.

    Shares are of all weights: those without a gradient are assumed to be distributed like the others.
    """
    edge = math.log2(rate) + _HALF_SPACING
    lost, total = 0, 0
    for parameter in parameters:
        lost += sum(n for e, n in parameter.weight.exponents.items() if e > edge)
        total += parameter.weight.nonzero + parameter.weight.zeros
    return lost / total if total else 0.0
