"""Weights stored in BF16 without an FP32 master copy: which updates are smaller than half of a weight's spacing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from ..numerics.formats import FORMATS
from ..numerics.histogram import exponent_counts
from ..records.training import ParameterGradients

RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
"""Learning rates that the outlook lists."""

_HALF_SPACING = FORMATS["bf16"].mantissa + 1
_NEVER = 200
"""Ratio given to weights that are zero: next to zero BF16 has room for any update."""


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
    """Share of the non-zero updates `rate * gradient` that rounding to BF16 takes back.

    Within the power of two that the edge falls in, magnitudes are taken to be spread evenly on the logarithmic scale.
    """
    edge = -math.log2(rate)
    lost, total = 0.0, 0
    for parameter in parameters:
        for ratio, count in parameter.ratios.items():
            lost += count * min(max(edge - ratio, 0.0), 1.0)
            total += count
    return lost / total if total else 0.0


def lost_by_adam(parameters: Iterable[ParameterGradients], rate: float) -> float:
    """The same for Adam's first steps, which move every weight that has a gradient by the learning rate.

    Shares are of all weights: it takes those without a gradient to be spread as the others are.
    """
    edge = math.log2(rate) + _HALF_SPACING
    lost, total = 0, 0
    for parameter in parameters:
        lost += sum(n for e, n in parameter.weight.exponents.items() if e > edge)
        total += parameter.weight.nonzero + parameter.weight.zeros
    return lost / total if total else 0.0


def outlook(parameters: Iterable[ParameterGradients]) -> tuple[Mapping[float, float], Mapping[float, float]]:
    """{learning rate: share lost} for Adam and for SGD."""
    kept = tuple(parameters)
    return {r: lost_by_adam(kept, r) for r in RATES}, {r: lost_by_sgd(kept, r) for r in RATES}
