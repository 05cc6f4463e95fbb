"""Between the corners that cuts reach: scopes changed one by one, in pairs or by the module, while a plan gets better."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from ..paths import enclosing
from .energy import FORBIDDEN, Energy
from .problem import Problem
from .solve import Candidate, evaluate

SCOPES = 16
"""Largest number of scopes whose pairs are all tried, and from several starts."""

DRAWS = 12
"""Choices drawn at random that the search begins from, besides the one it is given."""

VISITS = 30_000
"""Operations looked at, over all choices tried, where there are more scopes: what bounds the time on a large model."""

FEW_VISITS = 100_000
"""The same where there are few scopes, over all starts; a start that is begun after that is not followed."""

_Key = tuple[tuple[str, str], ...]


def refined(problem: Problem, start: Candidate, allowed_error: float) -> Candidate:
    """The cheapest choice that small changes lead to within `allowed_error`; `start` itself where nothing better is near.

    With few scopes, one or two are changed at a time, from several starts; with many, one, or all below one module.
    """
    energy = problem.energy
    limit = min(allowed_error, math.sqrt(FORBIDDEN) / 2)
    if len(energy.scopes) > SCOPES:
        return _walked(problem, energy, start, limit)
    rnd = random.Random(0)
    owners = sorted(energy.scopes)
    draws = [{owner: rnd.choice((problem.format, "fp32")) for owner in owners} for _ in range(DRAWS)]
    known, tries = dict[_Key, Candidate](), max(FEW_VISITS // max(len(problem.capture.nodes), 1), 20)
    starts = [start, *(_evaluated(problem, _joined(energy, labels), known) for labels in draws)]
    found = (_descended(problem, energy, point, limit, known, tries) for point in starts)
    return min(
        (point for point in found if point.predicted_error <= limit), key=lambda point: point.price, default=start
    )


def _walked(problem: Problem, energy: Energy, start: Candidate, limit: float) -> Candidate:
    """Downhill by changes of one scope and of whole modules, those first that are worth most, within `VISITS`."""
    tries = max(VISITS // max(len(problem.capture.nodes), 1), 20)
    best, known = start, {_key(dict(start.precision)): start}
    moves = _moves(problem, energy)
    unsuccessful = 0
    for owners, precision in itertools.cycle(moves):
        unsuccessful += 1
        if len(known) > tries or unsuccessful > len(moves):
            break
        changed = energy.settled({**best.precision, **dict.fromkeys(owners, precision)})
        if (key := _key(changed)) in known:
            continue
        known[key] = point = evaluate(problem, changed)
        if _rank(point, limit) < _rank(best, limit):
            best, unsuccessful = point, 0
    return best


def _moves(problem: Problem, energy: Energy) -> list[tuple[tuple[str, ...], str]]:
    """Sets of scopes and a precision for them: lowered those that save most, raised those that save least."""
    groups = {tuple(sorted({owner, *energy.tied_to(owner)})) for owner in energy.scopes}
    below: dict[str, set[str]] = {}
    for owner in energy.scopes:
        for path in enclosing(owner):
            below.setdefault(path, set()).add(owner)
    for inside in below.values():
        groups.add(tuple(sorted(inside | {tied for owner in inside for tied in energy.tied_to(owner)})))

    def saved(group: tuple[str, ...]) -> float:
        return sum(energy.scopes[owner][1] - energy.scopes[owner][0] for owner in group)

    worth = sorted(groups, key=lambda group: (-saved(group), group))
    return [move for a, b in zip(worth, reversed(worth), strict=True) for move in ((a, problem.format), (b, "fp32"))]


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
    problem: Problem, energy: Energy, start: Candidate, limit: float, known: dict[_Key, Candidate], tries: int
) -> Candidate:
    """Downhill by single changes and pairs of them: first to an error within the limit, then to the lowest price.

    tries: choices that may be known in the end.
    """
    best, better, seen = start, True, set[_Key]()
    while better:
        better = False
        for precision in _neighbours(problem, energy, best):
            key = _key(precision)
            if key in seen:
                continue
            seen.add(key)
            if key not in known and len(known) >= tries:
                return best
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
