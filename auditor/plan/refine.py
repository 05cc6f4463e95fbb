"""Between the corners that cuts reach: single scopes and pairs of scopes changed, as long as a plan gets better."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from .energy import FORBIDDEN, Energy
from .problem import Problem
from .solve import Candidate, evaluate

SCOPES = 16
"""Largest number of scopes whose pairs are all tried; with more of them, the points that cuts reach lie close enough."""

DRAWS = 12
"""Choices drawn at random that the search begins from, besides the one it is given."""

_Key = tuple[tuple[str, str], ...]


def refined(problem: Problem, start: Candidate, allowed_error: float) -> Candidate:
    """The cheapest choice that changing one scope or two at a time leads to, from several starts, within `allowed_error`.

    `start` itself where there are too many scopes, or where nothing better is near.
    """
    energy = problem.energy
    if len(energy.scopes) > SCOPES:
        return start
    limit = min(allowed_error, math.sqrt(FORBIDDEN) / 2)
    rnd = random.Random(0)
    owners = sorted(energy.scopes)
    draws = [{owner: rnd.choice((problem.format, "fp32")) for owner in owners} for _ in range(DRAWS)]
    known: dict[_Key, Candidate] = {}
    starts = [start, *(_evaluated(problem, _joined(energy, labels), known) for labels in draws)]
    found = (_descended(problem, energy, point, limit, known) for point in starts)
    return min(
        (point for point in found if point.predicted_error <= limit), key=lambda point: point.price, default=start
    )


def _joined(energy: Energy, labels: dict[str, str]) -> dict[str, str]:
    """The labels, those that must agree with an earlier one taken from it."""
    return energy.settled({owner: labels[min({owner, *energy.tied_to(owner)})] for owner in labels})


def _evaluated(problem: Problem, precision: dict[str, str], known: dict[_Key, Candidate]) -> Candidate:
    """The choice evaluated, once for all searches: with few scopes they meet the same ones again and again."""
    key = _key(precision)
    if key not in known:
        known[key] = evaluate(problem, precision)
    return known[key]


def _descended(
    problem: Problem, energy: Energy, start: Candidate, limit: float, known: dict[_Key, Candidate]
) -> Candidate:
    """Downhill by single changes and pairs of them: first to an error within the limit, then to the lowest price."""
    best, better, seen = start, True, set[_Key]()
    while better:
        better = False
        for precision in _neighbours(problem, energy, best):
            key = _key(precision)
            if key in seen:
                continue
            seen.add(key)
            point = _evaluated(problem, precision, known)
            if _rank(point, limit) < _rank(best, limit):
                best, better = point, True
    return best


def _key(precision: dict[str, str]) -> _Key:
    return tuple(sorted(precision.items()))


def _rank(point: Candidate, limit: float) -> tuple[float, float]:
    return max(0.0, point.predicted_error - limit), point.price


def _neighbours(problem: Problem, energy: Energy, point: Candidate) -> Iterator[dict[str, str]]:
    groups = sorted({tuple(sorted({owner, *energy.tied_to(owner)})) for owner in energy.scopes})
    other = {"fp32": problem.format, problem.format: "fp32"}
    for count in (1, 2):
        for changed in itertools.combinations(groups, count):
            flipped = {owner: other[point.precision[owner]] for group in changed for owner in group}
            yield energy.settled({**point.precision, **flipped})
