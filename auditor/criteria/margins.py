"""Margins of decisions such as an argmax: the gap between the two best candidates, and how many decisions flip under
errors of a given size. The quadratic form of a criterion gives its value for an error of any direction and size.

To second order, d' A A' d is the square of the share of the criterion's limit that an output error d uses. The matrix A
multiplies random signs e, since E<A e, d>^2 = d' A A' d.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch.utils.weak import WeakTensorKeyDictionary

from ..numerics.entries import entries, finite, is_number, is_plain
from ..numerics.formats import FORMATS, Format, dtype_of
from .criterion import Criterion
from .values import peak_of, rows

KINDS = ("top1", "topk", "flips")

OCTAVE = 10_000
"""Resolution of `Margins.allowed_change`: its base-2 logarithm is a multiple of 1 / OCTAVE."""

WINDOW = 8
"""Number of entries on either side of the boundary between the top k and the others that can change places."""

FAR, ROWS, ROUNDS = 6.0, 4096, 20
"""Number of standard errors beyond which a margin never flips; rows that are processed together; iterations of
`Margins.change` with `near`."""

LEAST, GROUP, GROUPS = 256, 64, 8
"""In `Margins.size_by_step`: minimum number of decisions, minimum sum of weights in a group, maximum number of
groups."""

POINTS, WEIGHTS = map(torch.from_numpy, hermegauss(8))
"""Points and weights of the Gauss-Hermite quadrature over exp(-x^2 / 2)."""


@dataclass(frozen=True)
class Margins:
    """The decisions of one output: the k-th largest entry of a row against the next, or any entry against a threshold.

    first, second: [decisions], indices of the candidates among the output's entries; second is None for a threshold.
    signs: 1 if the first is larger, else -1. size: the distance of the candidates, float64. lost: factor from the mean
    number of flips per decision to the share that the criterion counts. limit: allowed share of flips. inside,
    outside: [decisions, WINDOW at most], float64: the smallest chosen and the largest other entries of each row; None
    for a threshold.
    """

    first: torch.Tensor
    second: torch.Tensor | None
    signs: torch.Tensor
    size: torch.Tensor
    lost: float
    limit: float
    inside: torch.Tensor | None = None
    outside: torch.Tensor | None = None

    def flips(self, change: float) -> float:
        """Expected share of flips if every margin changes by a normal error of this standard deviation."""
        if self.inside is not None and self.outside is not None:
            replaced = count_replaced(self.inside, self.outside, change)
            return self.lost * float(replaced.sum()) / self.size.numel()
        if change <= 0:
            return 0.0
        chances = torch.special.ndtr(-self.size / change)
        return self.lost * float(chances.mean())

    @cached_property
    def allowed_change(self) -> float:
        """The largest change of the margins at which no more decisions flip than the limit allows.

        The upper end of the search is the allowed change of only each row's nearest pair, which is cheap to compute.
        """
        pair = replace(self, inside=None, outside=None)
        most = math.log2(pair.allowed_change) if self.inside is not None else 64.0
        tried = range(-64 * OCTAVE, math.ceil(most * OCTAVE))
        allowed = bisect_right(tried, self.limit, key=lambda n: self.flips(2.0 ** (n / OCTAVE)))
        return float(2.0 ** (allowed / OCTAVE - 64))

    @cached_property
    def weights(self) -> torch.Tensor:
        """[decisions], of sum 1: exp(-(margin / allowed change)^2 / 2), since clear decisions mostly have
        larger errors, which flip none of them.

        Equal weights for a threshold: too few entries lie near the threshold for a few random probes.
        """
        near = torch.ones_like(self.size)
        if self.second is not None:
            near = (-(self.size / self.allowed_change).square() / 2).exp()
        return near / near.sum()

    def change(self, reference: torch.Tensor, candidate: torch.Tensor, near: bool = False) -> float:
        """Root mean square of the changes of the margins; decisions with small margins have the largest weights.

        near: the weights depend on the result instead of the allowed change. The result is corrected if entries lie on
        a grid of spacing h, such as FP16's. Two candidates closer than h often become equal, and half of these
        decisions flip, as under an error uniform in [-h, h]. The variance of that error, h^2 / 3, exceeds the variance
        of two roundings by h^2 / 6, which is added. A grid also moves a threshold by d, to the middle between two
        numbers. As many decisions flip as under an error of variance pi d^2 / 2, which replaces rounding's h^2 / 12.
        """
        theirs = self._candidates(candidate)  # [2, decisions]
        moved = self._movement(reference, candidate)  # [decisions]
        square = moved.square()
        grid = _grid_of(theirs)
        if grid is not None and self.second is not None:
            half_epsilon = torch.full_like(theirs[0], grid.epsilon / 2)
            spacing = torch.ldexp(half_epsilon, torch.frexp(theirs[0]).exponent)  # h
            square = square + spacing.square() / 6
        if near and self.second is None:
            square = square + _threshold_variance(moved + self.signs * self.size)
        if near:
            return self._change_near(square)
        return float((square * self.weights).sum().clamp(0).sqrt())

    def _change_near(self, square: torch.Tensor) -> float:
        """The root of the weighted mean of squared changes, [decisions], whose weights depend on the result. It starts as
        the mean of all decisions and is refined."""
        result = square.mean().clamp(0).sqrt()
        size = self.size
        for _ in range(ROUNDS):
            is_near = size < FAR * result
            square = square[is_near]
            size = size[is_near]
            weight = (-(size / result).square() / 2).exp()
            weighted = (weight * square).sum() / weight.sum()
            result = weighted.clamp(0).sqrt() if len(weight) else result * 0
        return float(result)

    def size_by_step(self, reference: torch.Tensor, candidate: torch.Tensor, steps: int) -> torch.Tensor:
        """How much the margins change at each of the last `steps` tokens: the mean absolute change, divided by sqrt(2 /
        pi) times the root mean square change of all decisions. Tensors: [texts, tokens, vocabulary].

        For normal errors of one size, the result is 1. Errors that are independent of the margins flip as many
        decisions as normal errors of the same mean absolute value. A few tokens with large changes raise the root mean
        square. Tokens are grouped, and share a mean, so that each group has enough decisions with small margins.
        """
        moved = self._movement(reference, candidate).abs()  # [decisions]
        nearest = self.size.kthvalue(min(LEAST, len(self.size))).values
        width = nearest.clamp_min(self.allowed_change)
        weights = (-(self.size / width).square() / 2).exp()
        mean_square = (weights * moved.square()).sum() / weights.sum()
        usual = mean_square.sqrt() * math.sqrt(2 / math.pi)

        # Sums of weights and of weighted changes by step, [2, steps]; earlier tokens have negative steps.
        tokens = reference.shape[1]
        vocabulary = reference.shape[2]
        step = self.first // vocabulary % tokens - tokens + steps
        is_generated = step >= 0
        summands = torch.stack([weights, weights * moved])[:, is_generated]
        by_step = summands.new_zeros(2, steps).index_add_(1, step[is_generated], summands)

        # Groups of consecutive steps with about equal weights share a mean.
        until = by_step[0].cumsum(0)
        count = min(max(int(until[-1] / GROUP), 1), GROUPS)
        group = (until / until[-1] * count).long().clamp_max(count - 1)
        weight, total = by_step.new_zeros(2, count).index_add_(1, group, by_step)
        if not usual > 0:
            return torch.ones_like(until)
        by_group = total / weight / usual
        return by_group[group]

    def _movement(self, reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
        """How much the distance between the two candidates of each decision changes."""
        ours, theirs = (self._candidates(x) for x in (reference, candidate))
        return theirs[0] - theirs[1] - ours[0] + ours[1]

    def _candidates(self, x: torch.Tensor) -> torch.Tensor:
        """Both candidates of every decision, float64 [2, decisions]; zero in place of the threshold."""
        flat = x.detach().flatten()
        first = flat[self.first].double()
        return torch.stack([first, flat[self.second].double() if self.second is not None else torch.zeros_like(first)])

    def share(self, reference: torch.Tensor, candidate: torch.Tensor) -> float:
        """The change of the margins divided by the allowed change."""
        return self.change(reference, candidate) / self.allowed_change


def _grid_of(x: torch.Tensor) -> Format | None:
    """The coarsest low-precision format that represents all entries; None if there is none."""
    formats = [row for row in FORMATS.values() if row.low and row.native]
    for row in sorted(formats, key=lambda row: -row.epsilon):
        rounded = x.to(dtype_of(row.name)).to(x.dtype)
        if torch.equal(rounded, x):
            return row
    return None


_KNOWN: MutableMapping[torch.Tensor, dict[Criterion, Margins | None]] = WeakTensorKeyDictionary()
"""Cache of margins by reference tensor and criterion, since many runs are compared with one reference."""


def margins_of(criterion: Criterion, reference: torch.Tensor) -> Margins | None:
    """The decisions that a criterion counts; None if its limit allows no flip, or more flips than any error causes, or if
    it counts values that differ."""
    numbers = is_number(reference) and is_plain(reference) and not reference.is_complex()
    if criterion.kind not in KINDS or criterion.function is not None or criterion.allows_nothing or not numbers:
        return None
    if criterion.option("by", None) is not None:
        return None  # decisions were made before: the values show no margin
    known = _KNOWN.setdefault(reference, {})
    if criterion not in known:
        margins = find_margins(criterion, reference)
        known[criterion] = margins if margins is not None and margins.flips(math.inf) > margins.limit else None
    return known[criterion]


def find_margins(criterion: Criterion, reference: torch.Tensor) -> Margins | None:
    """The decisions that a criterion of one of KINDS counts, regardless of its limit; None without decisions.

    Decisions between equal or non-finite entries are left out: they count as never flipped.
    """
    values = reference.detach()
    places = torch.arange(values.numel(), device=values.device).view(values.shape)
    second: torch.Tensor | None = None
    inside: torch.Tensor | None = None
    outside: torch.Tensor | None = None
    if criterion.kind == "flips":
        # a decision for each entry: on which side of the threshold it is
        limit = criterion.limit
        lost = 1.0
        first = places.flatten()
        apart = values.flatten().double() - criterion.option("threshold", 0.0)
    else:
        # a decision for each row: entry k in falling order, the last that is chosen, against entry k + 1
        limit = 1 - criterion.limit
        k = int(criterion.option("k", 1))
        by_row = rows(values, criterion)  # [rows, entries]
        lost = 1.0 / k
        if k >= by_row.shape[1]:
            return None
        largest = by_row.topk(min(k + WINDOW, by_row.shape[1]), -1)
        first, second = rows(places, criterion).gather(1, largest.indices[:, k - 1 : k + 1]).unbind(1)
        ordered = largest.values.double()
        apart = ordered[:, k - 1] - ordered[:, k]
        inside = ordered[:, max(k - WINDOW, 0) : k].nan_to_num()
        outside = ordered[:, k:].nan_to_num()
    known = apart.isfinite() & (apart != 0)  # [decisions]
    if not bool(known.any()):
        return None

    def of_known(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[known]

    lost *= int(known.sum()) / apart.numel()
    return Margins(
        first[known],
        of_known(second),
        apart[known].sign(),
        apart[known].abs(),
        lost,
        limit,
        of_known(inside),
        of_known(outside),
    )


def count_replaced(inside: torch.Tensor, outside: torch.Tensor, change: float) -> torch.Tensor:
    """For each row: how many of the top-k entries are expected to be replaced, if normal errors change all entries.

    inside: [rows, a], the smallest top-k entries, in falling order; outside: [rows, b], the largest other entries.
    change: standard deviation of the difference of two entries, whose errors are assumed independent. A top-k entry
    with error e remains if fewer than `a` other entries exceed it. The number of these entries is a sum of independent
    trials, whose distribution is built up trial by trial. The mean over e is a Gauss-Hermite quadrature.
    """
    result = torch.zeros_like(inside[:, 0])
    if not change > 0:
        return result
    change = min(change, 1e100)  # with inf, differences of positions would be NaN
    is_near = inside[:, -1] - outside[:, 0] < FAR * change
    parts = [result[:0]]
    for chosen, others in zip(
        torch.split(inside[is_near], ROWS),
        torch.split(outside[is_near], ROWS),
        strict=True,
    ):
        parts.append(_expected_replaced(chosen, others, change))
    result[is_near] = torch.cat(parts)
    return result


def _expected_replaced(chosen: torch.Tensor, others: torch.Tensor, change: float) -> torch.Tensor:
    """`count_replaced` of a few rows, whose intermediate results fit into memory. Shapes: [rows, a], [rows, b] -> [rows]."""
    both = torch.cat([chosen, others], 1)  # [rows, a + b]
    count = chosen.shape[1]
    # [rows, a, points]: the position of each chosen entry after its error
    moved = chosen[..., None] + POINTS.to(chosen) * change / math.sqrt(2)
    # [rows, a, points, a + b]: the probability that another entry is above, 0 for the entry itself
    above = torch.special.ndtr((both[:, None, None] - moved[..., None]) * math.sqrt(2) / change)
    is_other = 1 - torch.eye(count, both.shape[1], dtype=above.dtype, device=above.device)  # [a, a + b]
    above = above * is_other[:, None]
    # `count` of [rows, a, points]: the probability that so many of the entries up to now are above
    chances = [torch.ones_like(moved), *[torch.zeros_like(moved)] * (count - 1)]
    for chance in above.unbind(-1):
        one_fewer = [torch.zeros_like(moved), *chances]
        chances = [x * (1 - chance) + y * chance for x, y in zip(chances, one_fewer, strict=False)]
    remains = torch.stack(chances).sum(0)  # [rows, a, points]
    weights = WEIGHTS / WEIGHTS.sum()  # [points]
    return ((1 - remains) * weights.to(chosen)).sum((1, 2))


def _threshold_variance(low: torch.Tensor) -> float:
    """The variance to add to the mean square of a threshold's margins if they lie on a grid; else 0."""
    above = low[low > 0]
    below = low[low <= 0]
    if not len(above) or not len(below):
        return 0.0
    nearest_above = float(above.min())
    nearest_below = -float(below.max())
    is_repeated_above = int((above == nearest_above).sum()) > 1
    is_repeated_below = int((below == -nearest_below).sum()) > 1
    if not (is_repeated_above and is_repeated_below):  # then the margins lie on no grid
        return 0.0
    spacing = nearest_above + nearest_below
    shift = (nearest_above - nearest_below) / 2  # of the threshold, to the middle between two numbers
    return math.pi / 2 * shift**2 - spacing**2 / 12


Form = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies random signs e, of the output's shape, by A, where E<A e, d>^2 = (share of the limit)^2 for an error d."""


def form_of(criterion: Criterion, reference: torch.Tensor) -> Form | None:
    """The Form of a criterion around `reference`; None if the measure has none, or the limit allows no error."""
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
    """Whether the criterion's Form couples entries along the first dimension, so that samples are not separate."""
    return "dim" in criterion.how.takes and criterion.option("dim", -1) % max(reference.dim(), 1) == 0


def relative_form(references: Sequence[torch.Tensor], limit: float) -> Form | None:
    """The Form of a limit on the relative L2 error of all `references` together; None if all references are zero."""
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
    # The weighted mean square of e_a - e_b over all decisions, divided by the square of the allowed change
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
"""{kind: function that makes its form}, for measures that grow with a quadratic form of the error."""
