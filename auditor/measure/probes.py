"""Hutchinson's estimator, for outputs and for gradients: random signs, one backward pass each, and how many more are worth it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..criteria.forms import Form
from .sums import Sums


@dataclass(frozen=True)
class Probe:
    """One pass. signs: random, one tensor for each that is probed, shaped as was asked. total: <signs, tensors>, a scalar to differentiate."""

    signs: list[torch.Tensor]
    total: torch.Tensor


def probes(tensors: Sequence[torch.Tensor], count: int, seed: int, shape: Sequence[Form] = ()) -> Iterator[Probe]:
    """`count` probes of the same tensors, each drawn when it is asked for. shape: what the signs of each go through.

    For a random sign vector v and any error d of what the tensors y depend on, E<v, J d>^2 = ||J d||^2; a backward pass
    from <v, y> gives <v, J d> = <J^T v, d> for all errors at once.
    Source: Hutchinson, A stochastic estimator of the trace (1989).
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = [signs(x, generator) for x in tensors]
        drawn = [form(x) for x, form in zip(drawn, shape, strict=True)] if shape else drawn
        # Of a sum, and not by `grad_tensors`: torch imports a compiler to compare the shapes of those.
        total = torch.stack([(x * weight).sum() for x, weight in zip(tensors, drawn, strict=True)]).sum()
        yield Probe(drawn, total)


def signs(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random signs; zero at masked entries, which hold infinities on purpose: nothing can move them."""
    found = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1).to(x)
    given = x.detach()
    if bool(torch.isfinite(given.sum())):  # then every entry is, and to look at each would take several passes
        return found
    return found.masked_fill_(~torch.isfinite(given), 0.0)


def moved(sums: Sums | None, passes: int, norm: float) -> float:
    """Relative L2 by which an error moves what was probed, from its squared inner products in so many passes, unit 1."""
    if sums is None or not norm:
        return 0.0
    return math.sqrt(sums.square() / passes) / norm
