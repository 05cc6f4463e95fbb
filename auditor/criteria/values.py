"""Computes the value of a criterion from a reference and a candidate, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..errors import CallbackError, describe, let_through
from ..numerics.entries import all_finite, dense, entries, extent, finite, is_number
from ..numerics.formats import dtype_name
from ..numerics.metrics import comparable_pairs, relative_l2
from .criterion import Criterion

Value = Callable[[torch.Tensor, torch.Tensor, Criterion], float]


def value(criterion: Criterion, reference: torch.Tensor, candidate: torch.Tensor) -> float:
    """The criterion's value for two tensors; NaN if a finite reference entry became non-finite in the candidate.

    Entries where the reference is NaN are ignored; if an infinite reference entry differs, the value is NaN. Raises:
    MeasureError(slug="shape-mismatch"), CallbackError(slug="bad-criterion") if a user's function raises.
    """
    if criterion.function is not None:
        try:
            return float(criterion.function(for_callback(reference), for_callback(candidate)))
        except Exception as error:
            let_through(error)
            raise CallbackError(
                f"the criterion {criterion.kind} of {criterion.output} raised {describe(error)}", slug="bad-criterion"
            ) from error
    worst = criterion.how.best
    for r, c in comparable_pairs([dense(reference)], [dense(candidate)]):
        if is_number(r):
            r, c = entries(r), entries(c)
            if not (all_finite(r) and all_finite(c)):
                differ = (r != c) & ~r.isnan() & ~(r.isfinite() & c.isfinite())
                if bool(differ.any()):
                    return math.nan
            r, c = (x if criterion.kind in ("top1", "topk") else x.double() for x in (r, c))  # ranks need no float64
        elif criterion.how.counts:
            r, c = r.double(), c.double()
        result = VALUES[criterion.kind](r, c, criterion) if r.numel() else criterion.how.best
        if math.isnan(result):
            return math.nan
        worst = min(worst, result) if criterion.how.sign == ">=" else max(worst, result)
    return worst


def for_callback(x: torch.Tensor) -> torch.Tensor:
    """A tensor as the user's functions get it: on the CPU, without gradients, and FP32 instead of a narrower format."""
    x = x.detach().cpu()
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def _gap(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Differences between both tensors; zero at entries whose reference is not finite."""
    return torch.where(torch.isfinite(r), c - r, torch.zeros_like(r))


def rel_max(r: torch.Tensor, c: torch.Tensor, _: Criterion) -> float:
    largest_gap = float(_gap(r, c).abs().max())
    largest_value = float(finite(r).abs().max())
    if largest_value:
        return largest_gap / largest_value
    return 0.0 if largest_gap == 0 else math.inf


def rows(x: torch.Tensor, criterion: Criterion) -> torch.Tensor:
    """Reshape to [rows, entries of a row]; rows lie along the criterion's `dim`, by default the last dimension."""
    dim = criterion.option("dim", -1)
    return x.movedim(dim, -1).reshape(-1, x.shape[dim])


def divergence(r: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL divergence of the softmax of every row [rows, n], in nats [rows]; and the differences of the log_softmax."""
    p, q = (torch.log_softmax(x, -1) for x in (r, c))
    gap = torch.where(p > -math.inf, p - q, torch.zeros_like(p))
    # For log-probabilities p near q, the sum of e^p (p - q) cancels larger terms; e^p (e^(q-p) - 1 - (q-p)) does not.
    return (p.exp() * (torch.expm1(-gap) + gap)).sum(-1), gap


def kl(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    return max(float(divergence(rows(r, criterion), rows(c, criterion))[0].mean()), 0.0)


def nats(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    return float(divergence(rows(r, criterion), rows(c, criterion))[1].abs().max())


def topk(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    ours = rows(r, criterion)  # [rows, entries]
    theirs = rows(c, criterion)
    k = int(criterion.option("k", 1))
    is_top1 = criterion.kind == "top1"  # as argmax: the first of equal entries
    chosen = theirs.argmax(-1, keepdim=True) if is_top1 else theirs.topk(k, -1).indices
    chosen_values = ours.gather(-1, chosen)  # [rows, k]
    least_of_top = ours.topk(k, -1).values[:, -1:]  # [rows, 1]
    return float((chosen_values >= least_of_top).double().mean())


def flips(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    threshold = criterion.option("threshold", None)
    by_values = criterion.option("by", None) is not None
    if r.is_floating_point() and not by_values:
        r, c = (x.sign() if threshold is None else x > threshold for x in (r, c))
    return float((r != c).double().mean())


def cosine(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    """Mean cosine similarity of the rows: 1 for two rows of zeros, 0 if only one is zero. Entries that are not finite
    in the reference are left out."""
    is_finite = torch.isfinite(r)
    ours = rows(torch.where(is_finite, r, torch.zeros_like(r)), criterion)  # [rows, entries]
    theirs = rows(torch.where(is_finite, c, torch.zeros_like(c)), criterion)
    our_size = ours.norm(dim=-1, keepdim=True)
    their_size = theirs.norm(dim=-1, keepdim=True)
    u = ours / our_size.clamp_min(1e-300)
    v = theirs / their_size.clamp_min(1e-300)
    # 1 - |u - v|^2 / 2, since u . v loses digits if it is nearly 1
    result = 1 - (u - v).square().sum(-1) / 2
    ours_is_zero = our_size[:, 0] == 0
    theirs_is_zero = their_size[:, 0] == 0
    result = torch.where(ours_is_zero & theirs_is_zero, torch.ones_like(result), result)
    result = torch.where(ours_is_zero ^ theirs_is_zero, torch.zeros_like(result), result)
    return float(result.mean())


def psnr(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    finite_entries = max(int(torch.isfinite(r).sum()), 1)
    mean_square = float(_gap(r, c).square().sum()) / finite_entries
    if mean_square == 0:
        return math.inf
    peak = peak_of(r, criterion)
    if not peak:
        return -math.inf
    return 20 * math.log10(peak) - 10 * math.log10(mean_square)


def peak_of(r: torch.Tensor, criterion: Criterion) -> float:
    """The peak value that a PSNR refers to, by default the range of the finite reference entries."""
    given = criterion.option("peak", None)
    if given is not None:
        return float(given)
    known = r[torch.isfinite(r)]
    if not known.numel():
        return 0.0
    return float(known.max() - known.min())


def iou(r: torch.Tensor, c: torch.Tensor, criterion: Criterion) -> float:
    form = criterion.option("form", "xyxy")
    ours = _corners(r.reshape(-1, 4), form)  # [boxes, (left, top, right, bottom)]
    theirs = _corners(c.reshape(-1, 4), form)
    first = torch.maximum(ours[:, :2], theirs[:, :2])
    last = torch.minimum(ours[:, 2:], theirs[:, 2:])
    shared = _area(first, last)
    our_area = _area(ours[:, :2], ours[:, 2:])
    their_area = _area(theirs[:, :2], theirs[:, 2:])
    union = our_area + their_area - shared
    is_same = (ours == theirs).all(-1)
    result = torch.where(is_same, torch.ones_like(union), shared / union.clamp_min(1e-300))
    if criterion.option("over", "min") == "mean":
        return float(result.mean())
    return float(result.min())


def _area(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Areas of boxes between two corners, [boxes, 2] each; 0 where the corners are in the wrong order."""
    return (last - first).clamp_min(0).prod(-1)


def _corners(boxes: torch.Tensor, form: str) -> torch.Tensor:
    if form == "xyxy":
        return boxes
    first, size = boxes[:, :2], boxes[:, 2:]
    first = first - size / 2 if form == "cxcywh" else first
    return torch.cat([first, first + size], -1)


VALUES: dict[str, Value] = {
    "rel_l2": lambda r, c, _: relative_l2(r, c),
    "max_abs": lambda r, c, _: float(_gap(r, c).abs().max()),
    "mean_abs": lambda r, c, _: float(_gap(r, c).abs().sum()) / max(int(torch.isfinite(r).sum()), 1),
    **{function.__name__: function for function in (rel_max, kl, nats, flips, topk, cosine, psnr, iou)},
    "top1": topk,
}
"""{name of an error measure: function (reference, candidate, criterion) -> value}, for tensors of equal shapes."""


def unfit(criterion: Criterion, name: str, reference: torch.Tensor) -> str | None:
    """The reason why a criterion does not suit an output; None if the criterion is suitable."""
    kind, how = criterion.kind, criterion.how
    sizes = extent(reference) if reference.is_nested else tuple(reference.shape)
    shape = f"{dtype_name(reference.dtype)}{list(sizes)}"
    if criterion.function is None:
        is_count = how.counts and reference.dtype != torch.bool
        if not is_number(reference) and not how.discrete and not is_count:
            return f"{kind} needs floating-point outputs, and {name} is {shape}: use flips"
        if reference.is_complex() and kind not in ("rel_l2", "max_abs", "mean_abs", "rel_max", "psnr"):
            return f"{kind} is for real numbers, and {name} is {shape}"
        if reference.is_nested and (kind == "iou" or "dim" in how.takes):
            return f"{kind} is for tensors of one shape, and {name} is nested: {shape}"
        if kind == "iou" and (not reference.dim() or reference.shape[-1] != 4):
            return f"iou is for boxes, four numbers in the last dimension, and {name} is {shape}"
        dim = criterion.option("dim", -1)
        if "dim" in how.takes and not -reference.dim() <= dim < reference.dim():
            return f"{criterion.measure_text} uses dimension {dim}, and {name} is {shape}"
        if kind in ("kl", "nats", "top1", "topk") and reference.shape[dim] < 2:
            return f"{kind} compares the entries of dimension {dim}, and {name}, {shape}, has only one"
        if kind == "topk" and reference.shape[dim] < criterion.option("k", 1):
            return f"{criterion.measure_text} needs more entries than dimension {dim} of {name} has: {shape}"
    own = value(criterion, reference, reference)
    if math.isnan(own) and criterion.function is None:
        return f"{criterion.measure_text} cannot be computed for {name}, whose FP32 values are not finite"
    if not criterion.holds(own):
        return f"{criterion.measure_text} of {name} is {own:g} for equal outputs, which violates the limit {criterion.limit:g}"
    return None
