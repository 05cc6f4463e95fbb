"""What is measured of an update: the norm of the gradients, and samples of updates that are lost or gradients that underflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .encoding import local

EVERY, FIRST = 25, 5
"""Updates between samples of lost updates and flushed gradients, and the first one that is sampled."""
SAMPLED, ENTRIES = 4, 1 << 14
"""Number of parameters that are sampled, the largest ones, and of entries of each."""
SIDE = 128
"""Number of rows and of columns of a gradient that are sampled."""
SUBNORMAL = 2.0**-14
"""FP16 values below this are subnormal."""
FLUSHES = 0.05
"""Share of the non-zero gradients that are subnormal in FP16, from which zeros count as underflow."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter and its gradient: of sharded ones this rank's parts."""
HALVES = (torch.float16, torch.bfloat16)


# The norm.


def gradients_of(optimizer: Any, is_plain: bool) -> list[torch.Tensor]:
    """The gradients of an optimizer: of sharded ones this rank's parts, of sparse ones the stored entries. is_plain:
    whether no parameter is sharded."""
    gradients = [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
    if is_plain and {g.layout for g in gradients} <= {torch.strided}:
        return gradients
    return [_stored(local(g).detach()) for g in gradients]


def _stored(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all entries together, in FP32, on the device of the first gradient; NaN and Inf stay."""
    kinds = {(g.device, g.dtype) for g in gradients}
    norms: list[torch.Tensor] = []
    for kind in kinds:
        members = gradients if len(kinds) == 1 else [g for g in gradients if (g.device, g.dtype) == kind]
        norms += _norms(members, kind[1])
    if len(kinds) > 1 or norms[0].dtype is not torch.float32:
        device = gradients[0].device
        norms = [x.to(device, torch.float32) for x in norms]
    return torch.linalg.vector_norm(torch.stack(norms))


def _norms(gradients: list[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The norm of each gradient, all of one dtype and device."""
    if dtype in HALVES:
        return torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch._foreach_norm(gradients, 2)


def is_finite(x: torch.Tensor) -> bool:
    """Whether no entry is Inf or NaN."""
    return bool(torch.isfinite(x).all())


def read(values: list[tuple[str, torch.Tensor]]) -> dict[str, list[float]]:
    """The values by name, with one synchronization for all that are on a GPU."""
    result: dict[str, list[float]] = {}
    if not values:
        return result
    device = next((x.device for _, x in values if x.device.type != "cpu"), None)
    if device is None:
        numbers = [float(x) for _, x in values]
    else:
        on_gpu = [x.detach().reshape(()).to(device, torch.float64, non_blocking=True) for _, x in values]
        numbers = torch.stack(on_gpu).tolist()
    for (name, _), value in zip(values, numbers, strict=True):
        result.setdefault(name, []).append(value)
    return result


def rate_of(optimizer: Any) -> float | None:
    """The largest learning rate, if it is known without a synchronization."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    known = [float(x) for x in rates if isinstance(x, int | float) or (torch.is_tensor(x) and x.device.type == "cpu")]
    return max(known, default=None) if not any(math.isnan(x) for x in known) else math.nan


# The samples.


@dataclass
class Sample:
    """A sampled update. before: (entries of a weight, a copy, whether the gradient is not zero) before the update."""

    before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def lost(self) -> Pair | None:
        """After the update: (number of the entries with a gradient that it left as they were, number of all); None
        without entries."""
        if not self.before:
            return None
        unchanged = [((now == was) & moved).sum() for now, was, moved in self.before]
        every = [moved.sum() for *_, moved in self.before]
        return torch.stack(unchanged).sum(), torch.stack(every).sum()


def largest_pairs(optimizer: Any) -> list[Pair]:
    """The largest parameters of an optimizer, with their gradients."""
    pairs: list[Pair] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.numel():
                pairs.append((local(p).detach(), _stored(local(p.grad).detach())))
    pairs.sort(key=lambda one: -one[1].numel())
    return pairs[:SAMPLED]


def sample(pairs: Sequence[Pair]) -> Sample:
    """Some entries of the parameters, with copies of them."""
    before = []
    for p, gradient in pairs:
        if p.shape == gradient.shape and p.is_contiguous() and gradient.is_contiguous():
            entries = _spread(p)
            before.append((entries, entries.clone(), _spread(gradient) != 0))
    return Sample(before)


def _spread(x: torch.Tensor) -> torch.Tensor:
    """At most ENTRIES entries of a contiguous tensor, evenly spaced, as a view."""
    flat = x.view(-1)
    return flat[:: max(flat.numel() // ENTRIES, 1)]


def flushed(pairs: Sequence[Pair], scale: torch.Tensor | None) -> Pair:
    """(number of gradients that underflowed to zero, number of all) in the parameters.

    Rows and columns of zeros alone do not count, since tokens that a batch lacks and units that are off give them. Zeros
    count as underflow if enough of the other entries are subnormal in FP16 at the loss scale, or if all are zero.
    """
    device = pairs[0][1].device
    zeros = torch.zeros((), device=device, dtype=torch.float32)
    whole = torch.zeros((), device=device, dtype=torch.float32)
    every = torch.ones((), device=device, dtype=torch.bool)
    smallest = torch.full((), SUBNORMAL, device=device) / (1.0 if scale is None else scale.to(device))
    for _, gradient in pairs:
        matrix = _thinned(gradient)
        is_set = matrix != 0
        every = every & ~is_set.any().to(device)
        counts = is_set.any(dim=1, keepdim=True) & is_set.any(dim=0, keepdim=True)
        is_tiny = is_set & (matrix.abs() < smallest.to(matrix.device))
        underflows = is_tiny.sum() > FLUSHES * is_set.sum()
        zeros += ((~is_set & counts).sum() * underflows).to(device)
        whole += counts.sum().to(device)
    everything = torch.ones((), device=device)
    return torch.where(every, everything, zeros), torch.where(every, everything, whole)


def _thinned(gradient: torch.Tensor) -> torch.Tensor:
    """At most about SIDE rows and columns of a gradient, as [rows, columns]."""
    rows = gradient.shape[0] if gradient.dim() > 1 else 1
    matrix = gradient.reshape(rows, -1)
    return matrix[:: max(matrix.shape[0] // SIDE, 1), :: max(matrix.shape[1] // SIDE, 1)]
