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
    for some in torch.split(terms, step or -(-len(terms) // SPLITS)):
        total = round_to((total + some.sum(0)).float(), format).double()
    return total


def truncated_sum(terms: Tensor, bits: int, step: int, promoted: int = 0) -> Tensor:
    """Sum terms, [k, *] -> [*], like a tensor core that aligns `step` terms and the accumulator to the largest of them,
    and truncates each to `bits` bits.

    promoted: number of terms after which the accumulator is added to an FP32 register and cleared; 0: never. Source:
    DeepSeek-V3 technical report (2024), section 3.5.2.
    """
    if promoted:
        parts = [truncated_sum(some, bits, step) for some in torch.split(terms, promoted)]
        return rounded_sum(torch.stack(parts), "fp32", 1)
    total = torch.zeros_like(terms[0])
    for some in torch.split(terms, step):
        aligned = torch.cat((total.unsqueeze(0), some))
        last = torch.ldexp(torch.ones_like(total), torch.frexp(aligned.abs().amax(0)).exponent - bits)
        total = (torch.trunc(aligned / last) * last).sum(0)
    return total
