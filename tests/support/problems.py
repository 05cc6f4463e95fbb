"""Small problems for the solver, and the slow truth: every labelling there is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from auditor.artefact.strategies import strategy_of
from auditor.execution.policy import Layout, plain
from auditor.plan.costs import Cost
from auditor.plan.problem import Problem
from auditor.records import Capture, Contribution, Verdict
from tests.support.subjects import capture_of

NOTHING = Contribution(0.0, 0.0, 0.0)


class Branches(nn.Module):
    """Values with several readers, a container, and operations of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.act(self.c(y) + self.b(y) + y)


class Tied(nn.Module):
    """Two of three layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Held(nn.Module):
    """Two layers, one of them in a container, share the weight of a third that is never called, as T5's embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.body = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.last = nn.Linear(4, 4, bias=False)
        self.body[0].weight = self.last.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x)) * 2.0


class Towers(nn.Module):
    """Two scopes read the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Shielded(nn.Module):
    """A layer that the author runs outside autocast, and one that switches it off itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.middle, self.careful = nn.Linear(4, 4), nn.Linear(4, 4), Careful()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weights = self.router(x.float())
        return self.careful(self.middle(x) * weights)


class Careful(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class Flat(nn.Module):
    """Products and other functions in one forward, and some in a module below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.below = nn.Parameter(torch.ones(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return self.below(y * y.pow(2).mean(-1, keepdim=True)) @ self.weight


@cache
def captured(kind: str) -> Capture:
    """The capture of `chain`, `branches`, `tied`, `towers`, `shielded`, `held` or `flat`, made once."""
    chain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    models = {"chain": chain, "branches": Branches(), "tied": Tied(), "towers": Towers()}
    models |= {"shielded": Shielded(), "held": Held(), "flat": Flat()}
    return capture_of(models[kind], torch.ones(2, 4))


def drawn(kind: str, strategy: str, rnd: random.Random, unsafe: float = 0.1, exceptions: bool = False) -> Problem:
    """A problem whose costs and errors spread over decades; rounding the model's input is free.

    exceptions: whether modules may keep functions.
    """
    capture = captured(kind)
    if not exceptions:
        capture = replace(capture, nodes={name: replace(node, function=None) for name, node in capture.nodes.items()})

    def contribution() -> Contribution:
        isolated = 10 ** rnd.uniform(-5, -1)
        return Contribution(isolated, isolated * rnd.random(), isolated * rnd.random())

    errors = {name: contribution() for name in capture.nodes}
    errors |= {p.name: NOTHING if p.kind == "input" else contribution() for p in capture.placeholders}
    verdicts = {name: Verdict("unsafe" if rnd.random() < unsafe else "safe", "drawn") for name in capture.nodes}
    costs = {name: Cost(int(10 ** rnd.uniform(6, 12)), int(10 ** rnd.uniform(3, 7)), False) for name in capture.nodes}
    return Problem(capture, costs, errors, verdicts, strategy, "fp16", "A100")


def owners_of(capture: Capture) -> list[str]:
    """Scopes that have a say: the root, the owners of nodes, and modules that hold a tied weight."""
    tied = (path for place in capture.placeholders if len(place.holders) > 1 for path in place.holders)
    return sorted({"", *(node.owner for node in capture.nodes.values()), *tied})


def tied_owners(capture: Capture) -> list[tuple[str, ...]]:
    """Groups of owners that read or hold one stored tensor: under `cast` it has one precision."""
    stored = {placeholder.name for placeholder in capture.placeholders if placeholder.kind != "input"}
    return [
        owners
        for name, owners in Layout(capture, strategy_of("cast")).deciding.items()
        if name in stored and len(owners) > 1
    ]


def labellings(owners: list[str]) -> Iterator[dict[str, str]]:
    """Every choice of precisions."""
    for labels in itertools.product(("fp16", "fp32"), repeat=len(owners)):
        yield dict(zip(owners, labels, strict=True))


def must_stay_fp32(problem: Problem) -> set[str]:
    """Owners of nodes that are unsafe in the format and that the strategy would lower."""
    resolution = problem.resolve(plain(problem.format))
    nodes = problem.capture.nodes
    return {nodes[name].owner for name in nodes if problem.forbidden(resolution, name)}
