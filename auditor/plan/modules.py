"""The choices for a plan over modules: proposed by minimum cuts and a local search, run on the recorded graph, made a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import let_through
from ..execution.execute import Executor, Run
from ..execution.policy import Policy, labelled, plain, scoped
from ..isolation.outputs import tensor_outputs
from ..numerics.formats import FORMATS
from ..paths import module_of
from ..records import Batch, Capture, Distance, Plan, ScopeChoice
from ..resources import table
from ..stages import beat
from .costs import memory_of
from .exceptions import needed
from .problem import Problem
from .search import LITTLE
from .solve import Candidate, candidates, evaluate, refined


@dataclass(frozen=True)
class Trial:
    """One model on some batches, its FP32 outputs, and the measure of distance that the budget speaks of.

    beside: the run that others on the first batch begin from, once there is one. paths: of each batch the recorded path
    that it takes, where there are several.
    """

    capture: Capture
    model: nn.Module
    batches: Sequence[Batch]
    references: Sequence[Sequence[torch.Tensor]]
    distance: Distance
    beside: list[Run] | None = None
    paths: Sequence[Capture] = ()

    def near(self) -> Trial:
        """The same, for runs that differ from one another in little: what the first one computed, the others do not compute
        again."""
        return replace(self, beside=[])

    def error(self, how: Policy) -> float:
        """Distance of low runs of the graph from the references, the worst batch's; NaN counts.

        Raises: UnsupportedInFormat where an operation refuses, or whatever else it raises.
        """
        paths = self.paths or [self.capture] * len(self.batches)
        each = zip(paths, self.references, self.batches, strict=True)
        return worst_of([float(self.distance(expected, self._run(path, how, x))) for path, expected, x in each])

    def _run(self, capture: Capture, how: Policy, batch: Batch) -> list[torch.Tensor]:
        beat()
        inputs = capture.bind(self.model, batch)
        beside = self.beside if batch is self.batches[0] else None
        values = dict[str, Any]()
        before, result = beside[0] if beside else None, None
        with torch.no_grad():
            for n, result in Executor(capture.graph_module, how, before=before).steps(*inputs):
                if beside is not None and before is None:
                    values[n.name] = result
        if beside is not None and before is None:
            beside.append(Run(values, how))
        return tensor_outputs(result)


def worst_of(values: Sequence[float]) -> float:
    """The largest; NaN if any is, so that it fails every threshold. Nothing gives 0."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


SHORTER = 0.05
"""Share of the predicted time that a plan without any FP32 may take longer than the fastest: it is easier to live with,
and no prediction is as good as that."""

WORK, FLOPS = 12_000, 4e6
"""Operations that all replays beside the search may run, and floating-point operations that count as one more."""

MOST, FEW = 24, 4
"""How many these replays are at most, and at least."""


class Modules:
    """Choices of precisions of modules, and what runs of them came to. log: {key: error}, inf where it does not run.
    left: replays that improving and explaining a choice may still make."""

    def __init__(self, problem: Problem, trial: Trial, budget: float) -> None:
        self.problem, self.budget, self._trial = problem, budget, trial
        self.nothing, self.low = everything(problem, "fp32"), everything(problem, problem.format)
        self.log: dict[frozenset[tuple[str, str]], float] = {}
        work = sum(1 + cost.flops / FLOPS for cost in problem.costs.values())
        self.left = min(MOST, max(int(WORK / max(work, 1)), FEW))

    def error(self, point: Candidate) -> float:
        """Error of the recorded graph under a choice; inf where an operation raises."""
        if self.key(point.precision) not in self.log:
            try:
                self.log[self.key(point.precision)] = self._trial.error(self.problem.running(labelled(point.precision)))
            except Exception as error:
                let_through(error)
                self.log[self.key(point.precision)] = math.inf
        return self.log[self.key(point.precision)]

    def least_harm(self) -> float | None:
        """The error with one scope low, of those that gain by it the one whose operations move the outputs least."""
        problem, energy = self.problem, self.problem.energy

        def moves(owner: str) -> float:
            names = (node.name for node in problem.operations_of.get(owner, ()))
            return math.fsum(
                problem.contributions[name].isolated ** 2 for name in names if name in problem.contributions
            )

        for owner in sorted(energy.scopes, key=moves):
            labels = dict.fromkeys(energy.together(owner), problem.format)
            point = evaluate(problem, energy.settled({**self.nothing.precision, **labels}))
            if point.cost < self.nothing.cost:
                return self.error(point)
        return None

    def error_within_means(self, precision: Mapping[str, str]) -> float | None:
        """The same; None where no more replays can be afforded."""
        if self.key(precision) not in self.log:
            if self.left <= 0:
                return None
            self.left -= 1
        return self.error(evaluate(self.problem, precision))

    @contextmanager
    def incremental(self) -> Iterator[None]:
        """In the body replays that differ in little begin from what the first of them computed; that is given up after it."""
        whole, self._trial = self._trial, self._trial.near()
        try:
            yield
        finally:
            self._trial = whole

    def holding(self) -> list[Candidate]:
        """Everything low, where it is known to hold the budget and lowers nothing unsafe."""
        low = self.low
        return [low] if low.feasible and self.log.get(self.key(low.precision), math.inf) <= self.budget else []

    def reject(self, point: Candidate) -> None:
        """Note that the artefact of a choice did not hold."""
        self.log[self.key(point.precision)] = math.inf

    def proposed(self, allowed: float) -> Candidate:
        """The cheapest choice that is predicted to have an error of at most `allowed`; everything low, where that is safe, takes
        hardly longer, and is known or else predicted to hold."""
        curve, low = self._curve, self.low
        index = next((i for i, point in enumerate(curve) if _within(point, allowed)), len(curve) - 1)
        point = curve[index]
        if curve[0].price < (1 - LITTLE) * point.price:
            point = refined(self.problem, (point, curve[max(index - 1, 0)]), max(allowed, point.predicted_error))
        holds = bool(self.holding()) if self.key(low.precision) in self.log else _within(low, allowed)
        fast = low.seconds <= (1 + SHORTER) * point.seconds and low.cost <= (1 + SHORTER) * point.cost
        return low if holds and fast else point

    def key(self, precision: Mapping[str, str]) -> frozenset[tuple[str, str]]:
        """What tells runs apart: the precisions of what has operations."""
        own = self.problem.operations_of
        return frozenset((path, kind) for path, kind in precision.items() if path in own or module_of(path) != path)

    @cached_property
    def _curve(self) -> list[Candidate]:
        return candidates(self.problem)


def _within(point: Candidate, allowed: float) -> bool:
    return point.feasible and point.predicted_error <= allowed


def everything(problem: Problem, precision: str) -> Candidate:
    """All in one precision: low, it is what `torch.autocast` around the model, or a cast of all of it, comes to."""
    return evaluate(problem, dict.fromkeys(problem.energy.scopes, precision))


def as_candidate(problem: Problem, plan: Plan) -> Candidate:
    """What a plan, or one of another strategy, chooses; what shares a weight with something in FP32 is so as well."""
    chosen, energy = scoped(plan.scopes), problem.energy
    labels = {owner: chosen(owner) for owner in energy.scopes}
    for owner in [owner for owner, label in labels.items() if label == "fp32"]:
        labels |= dict.fromkeys(energy.together(owner), "fp32")
    return evaluate(problem, energy.settled(labels))


def as_plan(problem: Problem, chosen: Candidate) -> Plan:
    """A choice as a plan that was not run yet."""
    fp32 = everything(problem, "fp32").seconds
    chosen = evaluate(problem, needed(problem, chosen.precision))
    resolution = problem.resolve(labelled(chosen.precision))
    return Plan(
        name=problem.name,
        strategy=problem.strategy,
        format=problem.format,
        scopes=scopes_of(problem, chosen),
        predicted_error=chosen.predicted_error,
        low_precision_flops=chosen.low_flops,
        predicted_speedup=fp32 / chosen.seconds if chosen.seconds else 1.0,
        note=_unfit(problem),
        raised=problem.raised,
        stored_low=problem.stored_low,
        objective=problem.objective,
        target=problem.device,
        memory=memory_of(problem.capture, problem.costs, resolution, problem.format),
        fp32_memory=memory_of(problem.capture, problem.costs, problem.resolve(plain("fp32")), problem.format),
    )


def _unfit(problem: Problem) -> str:
    """A note on devices without arithmetic in the format."""
    row = FORMATS[problem.format]
    if row.speed in table("plan/devices")[problem.device]:
        return ""
    return f"the {problem.device} has no {row.label} arithmetic: its speed-up is that of moving fewer bytes"


def scopes_of(problem: Problem, chosen: Candidate) -> dict[str, ScopeChoice]:
    """The table of scopes: the root, and every module whose precision differs from that of the module above it."""
    prices = problem.energy.scopes

    def saved(path: str) -> float:
        low, high, _ = prices.get(path, (0.0, 0.0, 0.0))
        return (high - low) / chosen.cost if chosen.cost else 0.0

    return {
        path: ScopeChoice(
            boundary.precision,
            output="keep" if boundary.keeps else "cast",
            cost=saved(path) if boundary.precision == "fp32" else None,
            keep=tuple(sorted(boundary.keep)),
        )
        for path, boundary in problem.running(labelled(chosen.precision)).wrapped.items()
    }
