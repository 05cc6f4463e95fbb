"""Rounding float32 tensors to the values of a format."""

from __future__ import annotations

import torch

from .table import FORMATS


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
    return _round_mantissa(x.float(), drop=23 - fmt.mantissa)


def _round_mantissa(x: torch.Tensor, drop: int) -> torch.Tensor:
    # Adding half of the dropped field, plus the kept field's last bit, rounds to nearest even in integer arithmetic.
    bits = x.contiguous().view(torch.int32)
    half = (1 << (drop - 1)) - 1
    rounded = (bits + half + ((bits >> drop) & 1)) & ~((1 << drop) - 1)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)
