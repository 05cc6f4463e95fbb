"""What a choice of precisions comes to, and the cheapest within a predicted error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..execution.policy import choice_from_labels
from ..execution.resolve import Resolution, is_low
from ..paths import nearest_above
from .costs import cast_seconds, seconds
from .energy import FORBIDDEN, timed_in
from .mincut import Choice
from .problem import Problem

VISITS = 20_000
"""Operations looked at, over all choices that one search tries: what bounds the time on a large model."""


@dataclass(frozen=True)
class Candidate:
    """A choice of precisions. precision: {owner: precision}; seconds: roofline time of one forward.

    cost: what the objective makes of it; of time, with what its stored weights count for. price: that, plus what its
    scopes must be worth.
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

    def within(self, allowed: float) -> bool:
        """Whether it is predicted to have an error of at most `allowed`."""
        return self.feasible and self.predicted_error <= allowed


def cheapest(problem: Problem, allowed: float) -> Candidate:
    """The cheapest choice that is predicted to have an error of at most `allowed`."""
    energy = problem.energy

    def made(high: Choice) -> Candidate:
        labels = {owner: "fp32" if owner in high else problem.format for owner in energy.scopes}
        return evaluate(problem, energy.settled(labels))

    most = min(allowed, math.sqrt(FORBIDDEN) / 2)
    return energy.cuts.cheapest(made, most, energy.groups, VISITS // max(len(problem.capture.nodes), 1))


def evaluate(problem: Problem, precision: Mapping[str, str]) -> Candidate:
    """Predicted error, time and share of low FLOPs of one choice of precisions; the root has one even without nodes."""
    key = frozenset(owner for owner, label in precision.items() if label == "fp32")
    if key not in problem.evaluated:
        problem.evaluated[key] = _evaluated(problem, precision)
    return problem.evaluated[key]


def _evaluated(problem: Problem, precision: Mapping[str, str]) -> Candidate:
    resolution = problem.resolve(choice_from_labels(precision))
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
