"""Inner products of gradients with errors, by samples and parts, without copies larger than a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..numerics.casting import in_format, plain
from ..numerics.entries import ON_GPU
from ..numerics.formats import Format

PARTS = 1024
_SHORT = 16
"""Length of a run below which adding it up takes longer than the products."""

_CHUNK = 1 << 18


def inner_products(
    gradient: torch.Tensor, value: torch.Tensor, samples: int, row: Format | None = None
) -> torch.Tensor:
    """<gradient, error> per sample and part: float32 [samples, parts].

    Parts are PARTS runs of neighbours, or the entries themselves where runs would be shorter than _SHORT.
    gradient, value: [*], equal shapes, with a sample each in equal runs. The error is `value` itself, or, with `row`,
    what rounding it to that format adds. Products that are not finite count as zero.
    """
    return inner_products_by_row(gradient, value, samples, [row])[0]


def inner_products_by_row(
    gradient: torch.Tensor, value: torch.Tensor, samples: int, rows: Sequence[Format | None]
) -> list[torch.Tensor]:
    """`inner_products` for each of several formats, while a run of neighbours is in the cache."""
    found = _sums(gradient, value, samples, rows, finite=False)
    broken = [index for index, sums in enumerate(found) if not _is_finite(sums)]
    mended = _sums(gradient, value, samples, [rows[index] for index in broken], finite=True) if broken else []
    for index, sums in zip(broken, mended, strict=True):
        found[index] = sums
    return found


def _is_finite(sums: torch.Tensor) -> bool:
    """Whether all entries are finite; mostly their sum tells, in one pass."""
    return math.isfinite(float(sums.sum())) or bool(torch.isfinite(sums).all())


def _sums(
    gradient: torch.Tensor, value: torch.Tensor, samples: int, rows: Sequence[Format | None], finite: bool
) -> list[torch.Tensor]:
    flat, values = gradient.detach().reshape(samples, -1), value.detach().reshape(samples, -1)
    width = flat.shape[1] // PARTS
    if width < _SHORT:
        return [_products(flat, values, row, finite) for row in rows]
    whole = width * PARTS
    parts, errors = flat[:, :whole].view(samples, PARTS, width), values[:, :whole].view(samples, PARTS, width)
    most = _CHUNK if flat.device.type == "cpu" else ON_GPU
    if flat.numel() <= most:
        found = [_products(parts, errors, row, finite).sum(2) for row in rows]
    else:
        found = [flat.new_empty(samples, PARTS) for _ in rows]
        step = max(1, most // width)
        for sample in range(samples):
            for start in range(0, PARTS, step):
                run = slice(start, start + step)
                for sums, row in zip(found, rows, strict=True):
                    sums[sample, run] = _products(parts[sample, run], errors[sample, run], row, finite).sum(1)
    if whole < flat.shape[1]:
        for sums, row in zip(found, rows, strict=True):
            sums[:, -1] += _products(flat[:, whole:], values[:, whole:], row, finite).sum(1)
    return found


def _products(gradient: torch.Tensor, value: torch.Tensor, row: Format | None, finite: bool) -> torch.Tensor:
    if row is None:
        error = value.to(gradient.dtype, copy=True)
    else:
        # A copy in any case: where the value is in the format already, it is the caller's own tensor.
        error = plain(in_format(value, row)).to(value.dtype, copy=True).sub_(value).to(gradient.dtype)
    error.mul_(gradient)
    return error.nan_to_num_(0.0, 0.0, 0.0) if finite else error
