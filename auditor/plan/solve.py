"""What a choice of precisions comes to, and the cheapest within a predicted error."""

from __future__ import annotations

import math
from collections.abc import Collection

from ..execution.policy import choice_keeping
from ..execution.resolve import Resolution, is_low
from .costs import cast_seconds, seconds
from .energy import timed_in
from .mincut import FORBIDDEN, Candidate, Choice
from .problem import Problem

VISITS = 20_000
"""Operations looked at, over all choices that one search tries: what bounds the time on a large model."""


def cheapest(problem: Problem, allowed: float) -> Candidate:
    """The cheapest choice that is predicted to have an error of at most `allowed`."""
    energy = problem.energy

    def made(high: Choice) -> Candidate:
        return evaluate(problem, high.intersection(energy.scopes))

    most = min(allowed, math.sqrt(FORBIDDEN) / 2)
    return energy.cuts.cheapest(made, most, energy.groups, VISITS // max(len(problem.capture.nodes), 1))


def evaluate(problem: Problem, high: Collection[str]) -> Candidate:
    """Predicted error, time and share of low FLOPs of one choice, settled. high: what is FP32."""
    settled = problem.energy.settled(high)
    if settled not in problem.evaluated:
        problem.evaluated[settled] = _evaluated(problem, settled)
    return problem.evaluated[settled]


def _evaluated(problem: Problem, high: Choice) -> Candidate:
    resolution = problem.resolve(choice_keeping(high, problem.format))
    costs, formats = problem.costs, {name: timed_in(resolution, name) for name in problem.capture.nodes}
    elapsed = sum(seconds(costs[name], fmt, problem.device) for name, fmt in formats.items())
    for name in problem.capture.nodes:
        if name in resolution.cast:  # weights are not counted: autocast keeps those it has cast
            elapsed += cast_seconds(problem.elements[name], problem.format, problem.device)
    flops = sum(costs[name].flops for name in formats)
    low_flops = sum(costs[name].flops for name, fmt in formats.items() if is_low(fmt))
    error, cost = math.sqrt(_square(problem, resolution)), problem.whole_price(resolution, elapsed)
    length = sum((owner in high) != (above in high) for owner, above in problem.energy.tree.items())
    price = cost + problem.island * length  # of the plan: scopes that are not as the one above them
    return Candidate(high, error, price, cost, elapsed, low_flops / flops if flops else 0.0)


def _square(problem: Problem, resolution: Resolution) -> float:
    """Squared error of the outputs; where the batches take several paths, on the one where it is largest."""
    squares = [(name, problem.node_square(resolution, name)) for name in problem.capture.nodes]
    squares += [(name, problem.cast_square(resolution, name)) for name in problem.rounded_values(resolution)]
    paths = problem.paths or [frozenset(name for name, _ in squares)]
    return max(sum(square for name, square in squares if name in path) for path in paths)
