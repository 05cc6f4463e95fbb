"""The choices for a plan over modules: proposed by minimum cuts and a local search, replayed on the recorded graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

from ..execution.chosen import labelled
from ..paths import module_of
from ..raised import let_through
from .choices import everything
from .problem import Problem
from .refine import refined
from .search import LITTLE
from .solve import Candidate, between, candidates
from .trial import Trial

SHORTER = 0.05
"""Share of the predicted time that a plan without any FP32 may take longer than the fastest: it is easier to live with,
and no prediction is as good as that."""


class Modules:
    """Choices of precisions of modules, and what replays of them came to. log: {precisions: error}, inf where it does not run;
    replays: how many were made.

    known: {choice: error} of runs of the whole model; of those within `budget` none need be replayed.
    """

    def __init__(self, problem: Problem, trial: Trial, budget: float, known: Iterable[tuple[Candidate, float]] = ()):
        self.problem, self.budget = problem, budget
        self.log: dict[frozenset[tuple[str, str]], float] = {}
        self.nothing, self._low = everything(problem, "fp32"), everything(problem, problem.format)
        self._trial, self._known = trial, list(known)
        self.replays = 0
        self.log |= {self._key(point): error for point, error in self._known}

    def error(self, point: Candidate, enough: float = math.inf) -> float:
        """Error of the recorded graph under a choice; inf where an operation raises. enough: batches beyond it are left out."""
        if (key := self._key(point)) not in self.log:
            self.replays += 1
            try:
                self.log[key] = self._trial.error(self.problem.running(labelled(point.precision)), enough)
            except Exception as error:
                let_through(error)
                self.log[key] = math.inf
        return self.log[key]

    @contextmanager
    def incremental(self) -> Iterator[None]:
        """In the body replays that differ in little begin from what the first of them computed; that is given up after it."""
        whole, self._trial = self._trial, self._trial.near()
        try:
            yield
        finally:
            self._trial = whole

    def is_logged(self, point: Candidate) -> bool:
        """Whether a choice was run."""
        return self._key(point) in self.log

    def holding(self) -> list[Candidate]:
        """Choices that hold the budget in runs of the model and lower nothing unsafe."""
        points = [point for point, _ in self._known]
        return [point for point in points if point.feasible and self.log[self._key(point)] <= self.budget]

    def simpler(self, point: Candidate, limit: float) -> Candidate:
        """Everything low, where that is safe, takes hardly longer, and holds in a run of the model or a replay."""
        low = self._low
        if point == low or not low.feasible or not _is_as_fast(low, point):
            return point
        return low if low in self.holding() or self.error(low) <= limit else point

    def reject(self, point: Candidate) -> None:
        """Note that the artefact of a choice did not hold."""
        self.log[self._key(point)] = math.inf

    def proposed(self, allowed: float) -> Candidate:
        """The cheapest choice that is predicted to have an error of at most `allowed`; everything low where that takes hardly
        longer."""
        curve = self._curve
        index = next((i for i, point in enumerate(curve) if _within(point, allowed)), len(curve) - 1)
        point = curve[index]
        if index and _is_worth(curve[index - 1], point):
            steps = between(self.problem, curve[index - 1], point)
            point = next(step for step in steps if step is point or _within(step, allowed))
        if _is_worth(curve[0], point):
            point = refined(self.problem, point, max(allowed, point.predicted_error))
        plain = _within(self._low, allowed) and not self.log.get(self._key(self._low), 0.0) > self.budget
        return self._low if plain and _is_as_fast(self._low, point) else point

    def _key(self, point: Candidate) -> frozenset[tuple[str, str]]:
        """What tells runs apart: the precisions of what has operations."""
        own = self.problem.operations_of
        return frozenset(
            (path, kind) for path, kind in point.precision.items() if module_of(path) != path or path in own
        )

    @cached_property
    def _curve(self) -> list[Candidate]:
        return candidates(self.problem)


def all_low_will_do(problem: Problem, allowed: float) -> bool:
    """Whether everything low is safe, takes about as long as the fastest choice, and is predicted to stay within `allowed`."""
    low = everything(problem, problem.format)
    return _within(low, allowed) and _is_as_fast(low, candidates(problem)[0])


def _is_as_fast(low: Candidate, other: Candidate) -> bool:
    return low.seconds <= (1 + SHORTER) * other.seconds and low.cost <= (1 + SHORTER) * other.cost


def _within(point: Candidate, allowed: float) -> bool:
    return point.feasible and point.predicted_error <= allowed


def _is_worth(better: Candidate, point: Candidate) -> bool:
    """Whether the better one takes less by as much as is worth a search."""
    return better.price < (1 - LITTLE) * point.price
