"""Inner products of gradients with errors, by samples and parts, without copies larger than a processor's cache."""

from __future__ import annotations

import torch

from ..formats.carried import in_format, plain
from ..formats.table import Format
from ..sparing import now

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
    found = _sums(gradient, value, samples, row, finite=False)
    if not bool(torch.isfinite(found).all()):
        found = _sums(gradient, value, samples, row, finite=True)
    return found


def _sums(gradient: torch.Tensor, value: torch.Tensor, samples: int, row: Format | None, finite: bool) -> torch.Tensor:
    flat, values = gradient.detach().reshape(samples, -1), value.detach().reshape(samples, -1)
    width = flat.shape[1] // PARTS
    if width < _SHORT:
        return _products(flat, values, row, finite)
    whole = width * PARTS
    parts, errors = flat[:, :whole].view(samples, PARTS, width), values[:, :whole].view(samples, PARTS, width)
    most = _CHUNK if flat.device.type == "cpu" else now().run
    if flat.numel() <= most:
        sums = _products(parts, errors, row, finite).sum(2)
    else:
        sums = flat.new_empty(samples, PARTS)
        step = max(1, most // width)
        for sample in range(samples):
            for start in range(0, PARTS, step):
                run = slice(start, start + step)
                sums[sample, run] = _products(parts[sample, run], errors[sample, run], row, finite).sum(1)
    if whole < flat.shape[1]:
        sums[:, -1] += _products(flat[:, whole:], values[:, whole:], row, finite).sum(1)
    return sums


def _products(gradient: torch.Tensor, value: torch.Tensor, row: Format | None, finite: bool) -> torch.Tensor:
    if row is None:
        error = value.to(gradient.dtype, copy=True)
    else:
        # A copy in any case: where the value is in the format already, it is the caller's own tensor.
        error = plain(in_format(value, row)).to(value.dtype, copy=True).sub_(value).to(gradient.dtype)
    error.mul_(gradient)
    return error.nan_to_num_(0.0, 0.0, 0.0) if finite else error
