"""Emulates matrix products whose accumulator has fewer bits than FP32."""

from __future__ import annotations

import torch
from torch import Tensor

from .casting import round_to

SPLITS = 4
"""Number of thread blocks that are assumed to compute the sum of one entry together (split-k)."""


def rounded_sum(terms: Tensor, format: str, step: int = 0) -> Tensor:
    """Sum terms over their first dimension, [k, *] -> [*], in FP64; the accumulator is rounded to a format after every
    `step` terms, by default after each of SPLITS parts."""
    total = torch.zeros_like(terms[0])
    for part in _blocks(terms, step or -(-len(terms) // SPLITS)).sum(1):
        total = round_to((total + part).float(), format).double()
    return total


def truncated_sum(terms: Tensor, bits: int, step: int, promoted: int = 0) -> Tensor:
    """Sum terms, [k, *] -> [*], like a tensor core: `step` terms and the accumulator are aligned to the largest of
    these numbers, and truncated to `bits` bits.

    promoted: number of terms after which the accumulator is added to an FP32 register and cleared; 0: never. Source:
    DeepSeek-V3 technical report (2024), section 3.5.2.
    """
    if promoted:
        return rounded_sum(truncated_sum(_blocks(terms, promoted).transpose(0, 1), bits, step), "fp32", 1)
    total, blocks = torch.zeros_like(terms[0]), _blocks(terms, step)
    for some, most in zip(blocks, blocks.abs().amax(1).clamp(min=1e-30), strict=True):
        largest = torch.maximum(total.abs(), most)
        last = largest / torch.frexp(largest).mantissa * 2.0**-bits
        total = torch.trunc(torch.cat((total.unsqueeze(0), some)) / last).sum(0) * last
    return total


def _blocks(terms: Tensor, step: int) -> Tensor:
    """Blocks of `step` terms, the last one with zeros at the end: [k, *] -> [k / step, step, *]."""
    rest = terms.new_zeros(-len(terms) % step, *terms.shape[1:])
    return torch.cat((terms, rest)).reshape(-1, step, *terms.shape[1:])
