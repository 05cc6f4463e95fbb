"""The quadratic form of a criterion: how its value depends, to second order, on the direction and size of an error.

Decisions have one too, see margins.py. To second order the squared share of the limit is d' A A' d for an output error
d. The matrix A multiplies random signs e, since E<A e, d>^2 = d' A A' d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..numerics.entries import entries, finite, is_plain
from .criterion import Criterion
from .margins import margins_of
from .values import peak_of

Form = Callable[[torch.Tensor], torch.Tensor]
"""A function that multiplies random signs e, of the output's shape, by A, so that E<A e, d>^2 is the squared share
of d."""


def form_of(criterion: Criterion, reference: torch.Tensor) -> Form | None:
    """The function that multiplies signs by A; None where the measure has no quadratic form, or allows no error."""
    make = FORMS.get(criterion.kind) if criterion.function is None else None
    if (
        make is None
        or criterion.allows_nothing
        or not reference.numel()
        or (criterion.kind != "rel_l2" and not is_plain(reference))
    ):
        return None
    return make(criterion, reference.detach())


def across(criterion: Criterion, reference: torch.Tensor) -> bool:
    """Whether the form couples entries along the first dimension, so that samples cannot be treated separately."""
    return "dim" in criterion.how.takes and criterion.option("dim", -1) % max(reference.dim(), 1) == 0


def relative_form(references: Sequence[torch.Tensor], limit: float) -> Form | None:
    """The quadratic form of a limit of the relative L2 error of all these outputs together."""
    size = math.hypot(*(float(finite(entries(x.detach())).double().norm()) for x in references))
    return (lambda signs: signs / (size * limit)) if size else None


def _psnr(criterion: Criterion, reference: torch.Tensor) -> Form | None:
    # share = 10^((limit - psnr) / 20) = 10^(limit / 20) ||d|| / (sqrt(n) peak)
    x = entries(reference).double()
    peak = peak_of(x, criterion)
    if not peak:
        return None
    scale = 10 ** (criterion.limit / 20) / (peak * math.sqrt(max(int(torch.isfinite(x).sum()), 1)))
    return lambda signs: signs * scale


def _kl(criterion: Criterion, reference: torch.Tensor) -> Form | None:
    # KL = 1/2 d' F d of each row, F = diag(p) - p p' = A A' with A = diag(sqrt p) - p (sqrt p)'
    dim = criterion.option("dim", -1)
    p = reference.softmax(dim)
    count = reference.numel() // reference.shape[dim]
    scale = 1 / math.sqrt(2 * count * criterion.limit)

    def shape(signs: torch.Tensor) -> torch.Tensor:
        spread = p.sqrt() * signs
        return (spread - p * spread.sum(dim, keepdim=True)) * scale

    return shape


def _cosine(criterion: Criterion, reference: torch.Tensor) -> Form | None:
    # 1 - cos = |d across r|^2 / (2 |r|^2) of each row
    dim = criterion.option("dim", -1)
    x = finite(reference)
    size = x.norm(dim=dim, keepdim=True)
    count = reference.numel() // reference.shape[dim]
    scale = 1 / math.sqrt(2 * count * (1 - criterion.limit))

    def shape(signs: torch.Tensor) -> torch.Tensor:
        unit = torch.where(size > 0, x / size, torch.zeros_like(x))
        beside = signs - unit * (unit * signs).sum(dim, keepdim=True)
        return torch.where(size > 0, beside / size, torch.zeros_like(x)) * scale

    return shape


def _decisions(criterion: Criterion, reference: torch.Tensor) -> Form | None:
    # The weighted mean square of e_a - e_b over all decisions, beside the square of what their limit allows
    margins = margins_of(criterion, reference)
    if margins is None:
        return None
    scale = margins.signs * margins.weights.sqrt() / margins.allowed_change

    def shape(signs: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(signs).flatten()
        drawn = signs.flatten()[margins.first] * scale.to(signs)
        result[margins.first] = drawn
        if margins.second is not None:
            result[margins.second] = -drawn
        return result.view(signs.shape)

    return shape


FORMS: dict[str, Callable[[Criterion, torch.Tensor], Form | None]] = {
    "rel_l2": lambda criterion, reference: relative_form([reference], criterion.limit),
    "psnr": _psnr,
    "kl": _kl,
    "cosine": _cosine,
    **dict.fromkeys(("top1", "topk", "flips"), _decisions),
}
"""Kinds that are monotonic in a quadratic form of the error."""
