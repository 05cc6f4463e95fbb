"""The Pareto curve of error against time: every point a minimum cut over the scopes, the multiplier on error swept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..execution.policy import labelled
from ..execution.resolve import Resolution, is_low
from ..paths import nearest_above
from .costs import cast_seconds, seconds
from .energy import FORBIDDEN, Energy, timed_in
from .problem import Problem

VISITS = 20_000
"""Operations looked at, over all choices that one search tries: what bounds the time on a large model."""

TINY = 1e-9
"""Share of the price, or of the error, that no change is made for: sums are rounded."""


@dataclass(frozen=True)
class Candidate:
    """One point of the Pareto curve. precision: {owner: precision}; seconds: roofline time of one forward.

    cost: what the objective makes of it; of time, with what its stored weights count for. price: that, plus what its
    scopes must be worth; what the curve is ordered by.
    """

    precision: Mapping[str, str]
    predicted_error: float
    seconds: float
    price: float
    low_flops: float
    cost: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether nothing runs low that is unsafe, untested, or would be handed two dtypes: one run that happens to hold does not
        make it safe."""
        return self.predicted_error < math.sqrt(FORBIDDEN)


def candidates(problem: Problem) -> list[Candidate]:
    """Points of the Pareto curve from everything low to everything FP32, fastest first, dominated ones dropped.

    The last one is everything FP32, also where no error is predicted: a low run may still be refused.
    For a multiplier m, the energy  time + m * error^2  is a sum of one term per scope and one per pair of scopes that
    exchange values, and each pair term only penalises unequal labels: its minimum is a minimum cut.
    Source: Kolmogorov and Zabih, What energy functions can be minimized via graph cuts? (2004).
    """
    energy = problem.energy
    owners = sorted(energy.scopes)
    labelings = {tuple(problem.format for _ in owners), tuple("fp32" for _ in owners)}
    for high in map(energy.cut, energy.multipliers()):
        labelings.add(tuple("fp32" if owner in high else problem.format for owner in owners))
    points = [evaluate(problem, dict(zip(owners, labels, strict=True))) for labels in sorted(labelings)]
    points.sort(key=lambda point: (point.price, point.predicted_error))
    front: list[Candidate] = []
    for point in points:
        if not front or point.predicted_error < front[-1].predicted_error:
            front.append(point)
    slowest = next(point for point in points if set(point.precision.values()) == {"fp32"})
    return front if front[-1] is slowest else [*front, slowest]


def refined(problem: Problem, starts: Sequence[Candidate], allowed: float) -> Candidate:
    """The cheapest choice within `allowed` that small changes lead to: of one scope, of all below a module, or of two.

    Downhill from each start, first to an error within the limit, then to the lowest price: as far as the energy tells, which
    costs next to nothing, and from the best of that as each change really turns out, as many as can be looked at.
    """
    tries, seen = VISITS // max(len(problem.capture.nodes), 1), set[frozenset[tuple[str, str]]]()
    most = min(allowed, math.sqrt(FORBIDDEN) / 2)

    def rank(point: Candidate) -> tuple[float, float]:
        return max(0.0, point.predicted_error - most), point.price

    def walked(best: Candidate) -> Candidate:
        better, labels = True, dict(best.precision)
        while better:
            better = False
            for change in _changes(problem.energy, problem.format, labels):
                precision = problem.energy.settled({**best.precision, **change})
                if (key := frozenset(precision.items())) in seen:
                    continue
                if len(seen) > tries:
                    return best
                seen.add(key)
                if rank(point := evaluate(problem, precision)) < rank(best):
                    best, better = point, True
                    labels.update(precision)
        return best

    foretold = [evaluate(problem, _downhill(problem, start, most**2)) for start in starts]
    return min(map(walked, sorted((*starts, *foretold), key=rank)), key=rank)


def _downhill(problem: Problem, start: Candidate, most: float) -> Mapping[str, str]:
    """The precisions where no change is for the better. most: the squared error that is allowed."""
    energy, labels = problem.energy, dict(start.precision)
    square, price, better = start.predicted_error**2, start.price, True
    while better:
        better = False
        for change in _changes(energy, problem.format, labels):
            wanted, value = energy.changed(labels, change)
            over, left = max(0.0, square - most), max(0.0, square + value.square - most)
            if left < over * (1 - TINY) or (left <= over and value.price < -TINY * price):
                labels |= wanted
                square, price, better = square + value.square, price + value.price, True
    return labels


def _changes(energy: Energy, format: str, labels: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Scopes with another precision: lowered those first that save most, raised those that save least; then pairs of them."""
    for first, last in zip(energy.groups, reversed(energy.groups), strict=True):
        yield dict.fromkeys(first, format)
        yield dict.fromkeys(last, "fp32")
    for one, other in energy.neighbours:
        for kinds in itertools.product((format, "fp32"), repeat=2):
            if labels[one[0]] != kinds[0] and labels[other[0]] != kinds[1]:
                yield {**dict.fromkeys(one, kinds[0]), **dict.fromkeys(other, kinds[1])}


def evaluate(problem: Problem, precision: Mapping[str, str]) -> Candidate:
    """Predicted error, time and share of low FLOPs of one choice of precisions; the root has one even without nodes."""
    key = frozenset(precision.items())
    if key not in problem.evaluated:
        problem.evaluated[key] = _evaluated(problem, precision)
    return problem.evaluated[key]


def _evaluated(problem: Problem, precision: Mapping[str, str]) -> Candidate:
    resolution = problem.resolve(labelled(precision))
    costs, formats = problem.costs, {name: timed_in(resolution, name) for name in problem.capture.nodes}
    elapsed = sum(seconds(costs[name], fmt, problem.device) for name, fmt in formats.items())
    for name in problem.capture.nodes:
        if name in resolution.cast:  # weights are not counted: autocast keeps those it has cast
            elapsed += cast_seconds(problem.elements[name], problem.format, problem.device)
    flops = sum(costs[name].flops for name in formats)
    low_flops = sum(costs[name].flops for name, fmt in formats.items() if is_low(fmt))
    error, cost = math.sqrt(_square(problem, resolution)), problem.whole_price(resolution, elapsed)
    price = cost + problem.island * _length(precision)
    return Candidate(dict(precision), error, elapsed, price, low_flops / flops if flops else 0.0, cost)


def _square(problem: Problem, resolution: Resolution) -> float:
    """Squared error of the outputs; where the batches take several paths, on the one where it is largest."""
    squares = [(name, problem.node_square(resolution, name)) for name in problem.capture.nodes]
    squares += [(name, problem.cast_square(resolution, name)) for name in problem.rounded_values(resolution)]
    paths = problem.paths or [frozenset(name for name, _ in squares)]
    return max(sum(square for name, square in squares if name in path) for path in paths)


def _length(precision: Mapping[str, str]) -> int:
    """Scopes whose precision differs from that of the scope above them: the length of the plan."""
    known = {"", *precision}
    above = {owner: nearest_above(owner, known) for owner in precision}
    return sum(up is not None and precision.get(up, "fp32") != precision[owner] for owner, up in above.items())
