"""Errors on unseen inputs: an upper bound from drawing rows of the measured outputs again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ...numerics.entries import is_number

DRAWS = 200
"""Number of drawn sets of rows. Source: Efron, Bootstrap Methods: Another Look at the Jackknife (1979)."""

QUANTILE = 0.99
"""Share of the drawn sets whose errors are below the bound: at least 19 of 20 unseen sets should be."""

WORSE = 2.0
"""Factor by which the change of an unseen row is assumed to exceed the largest measured one."""

LEAST_ROWS = 8
"""Minimum number of measured rows; fewer say nothing about others."""

MOST_ENTRIES = 1 << 26
"""Maximum number of entries of all drawn sets together, which bounds the time."""

Pair = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Outputs of FP32 and of a candidate, for one batch."""

Distance = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]


def bound_of(pairs: Sequence[Pair], distance: Distance) -> float:
    """The error below which QUANTILE of the drawn sets are; 0 if the outputs have too few rows, or none in common.

    Rows that are worse than all measured ones are common where errors differ much: a copy of the worst row, with WORSE
    times its change, is among the rows. A set has as many rows as the first batch. Its rows are drawn with replacement from the rows of all batches, which
    should be calibration inputs, or held-out ones: those were not searched on, and may differ.
    """
    rows = _rows_of(pairs)
    if rows is None:
        return 0.0
    reference, outputs = _with_worse_row(*rows)
    count, size = len(reference[0]), len(pairs[0][0][0])
    entries = size * sum(one[0].numel() for one in reference)
    draws = min(DRAWS, MOST_ENTRIES // max(entries, 1))
    if draws < DRAWS // 4:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    errors = list[float]()
    for _ in range(draws):
        picked = torch.randint(count, (size,), generator=generator)
        errors.append(distance([one[picked] for one in reference], [one[picked] for one in outputs]))
    if any(map(math.isnan, errors)):
        return math.nan
    return sorted(errors)[int(QUANTILE * (len(errors) - 1))]


def _with_worse_row(
    reference: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs with a further row: the one that changed most, with WORSE times its change."""
    shares = list[torch.Tensor]()
    for x, y in zip(reference, outputs, strict=True):
        squares = (y - x).abs().square().flatten(1).sum(1)
        shares.append(squares / x.abs().square().sum().clamp(min=1e-30))
    worst = int(torch.stack(shares).sum(0).argmax())
    last = slice(worst, worst + 1)
    more = [x[last] + WORSE * (y[last] - x[last]) for x, y in zip(reference, outputs, strict=True)]
    pairs = zip(outputs, more, strict=True)
    return [torch.cat([x, x[last]]) for x in reference], [torch.cat(pair) for pair in pairs]


def _rows_of(pairs: Sequence[Pair]) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """The outputs of all batches, joined along their first dimension; None if they have other shapes or too few rows."""
    outputs = [one for pair in pairs for one in pair]  # of FP32 and of the quantized model, for each batch
    if not outputs or not outputs[0] or len({len(one) for one in outputs}) > 1:
        return None
    for one in outputs:
        has_rows = all(is_number(x) and x.dim() and not x.is_nested and not x.is_sparse for x in one)
        if not has_rows or len({len(x) for x in one}) > 1:
            return None
    for same_output in zip(*outputs, strict=True):
        if len({x.shape[1:] for x in same_output}) > 1:
            return None
    if sum(len(reference[0]) for reference, _ in pairs) < LEAST_ROWS:
        return None
    references, candidates = zip(*pairs, strict=True)
    return _joined_rows(references), _joined_rows(candidates)


def _joined_rows(batches: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Each output of all batches as one tensor."""
    return [torch.cat(of_batches) for of_batches in zip(*batches, strict=True)]
