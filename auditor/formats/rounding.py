"""Rounding float32 tensors to the values of a format."""

from __future__ import annotations

import math

import torch

from .table import FORMATS, Format

_SINGLE = 23
"""Fraction bits of float32."""


def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x` rounded to nearest even in the format `name`, returned as float32.

    Shapes: [*] -> [*]. Beyond the format's range: inf, or the largest value where the format has no inf. NaN stays.
    """
    fmt = FORMATS[name]
    if fmt.name == "fp32":
        return x.float()
    if fmt.overflows_to == "largest":
        x = x.clamp(-fmt.largest, fmt.largest)
    if fmt.dtype is not None:
        return x.to(fmt.dtype).float()
    return _by_table(x.float(), fmt)


def _by_table(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Rounding by a format's numbers alone, where torch has no such type."""
    rounded = _round_mantissa(x, drop=_SINGLE - fmt.mantissa)
    if fmt.min_exponent > FORMATS["fp32"].min_exponent:  # subnormals of float32's own range are spaced by the same bits
        steps = torch.round(x / fmt.smallest_subnormal)  # exact: both are float32, one of them a power of two
        rounded = torch.where(x.abs() < fmt.smallest_normal, steps * fmt.smallest_subnormal, rounded)
    if fmt.overflows_to == "inf":
        rounded = torch.where(rounded.abs() > fmt.largest, torch.copysign(x.new_tensor(math.inf), x), rounded)
    return rounded


def _round_mantissa(x: torch.Tensor, drop: int) -> torch.Tensor:
    # Adding half of the dropped field, plus the kept field's last bit, rounds to nearest even in integer arithmetic.
    bits = x.contiguous().view(torch.int32)
    half = (1 << (drop - 1)) - 1
    rounded = (bits + half + ((bits >> drop) & 1)) & ~((1 << drop) - 1)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)
