"""Small problems for the solver, and the slow truth: every labelling there is."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from auditor.artefact.strategies import strategy_of
from auditor.execution.policy import Layout, plain
from auditor.plan.costs import Cost, costs_of
from auditor.plan.problem import Problem
from auditor.records import Capture, Contribution, Verdict
from tests.support.replaying import Model
from tests.support.subjects import capture_of

NOTHING = Contribution(0.0, 0.0, 0.0)


def branching(m: Any, x: Tensor) -> Tensor:
    """Values with several readers, a container, and operations of the root's own."""
    y = m.a(x)
    return m.act(m.c(y) + m.b(y) + y)


def branches() -> nn.Module:
    return Model(branching, a=linear(), b=linear(), c=nn.Sequential(linear(), nn.LayerNorm(4)), act=nn.GELU())


def held() -> nn.Module:
    """Two layers, one of them in a container, share the weight of a third that is never called, as T5's embeddings do."""
    shared, body, last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4, bias=False)
    body[0].weight = last.weight = shared.weight
    return Model(lambda m, x: m.last(m.body(x)) * 2.0, shared=shared, body=body, last=last)


def with_region() -> nn.Module:
    """Two products, `first` in a region of BF16."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = m.first(x)
        return m.second(y.float())

    return Model(forward, first=linear(), second=linear())


class Careful(nn.Linear):
    """Switches autocast off itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def tied() -> nn.Module:
    """Two of three layers share a weight."""
    model = Model(lambda m, x: m.last(m.middle(m.first(x))), **{name: linear() for name in ("first", "middle", "last")})
    model.last.weight = model.first.weight
    return model


def shielded(m: Any, x: Tensor) -> Tensor:
    """A layer that the author runs outside autocast, and one that switches it off itself."""
    with torch.autocast("cpu", enabled=False):
        weights = m.router(x.float())
    return m.careful(m.middle(x) * weights)


def flat(m: Any, x: Tensor) -> Tensor:
    """Products and other functions in one forward, and some in a module below."""
    y = x @ m.weight
    return m.below(y * y.pow(2).mean(-1, keepdim=True)) @ m.weight


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(*[linear() for _ in range(5)]),
    "branches": branches,
    "tied": tied,
    "towers": lambda: Model(lambda m, x: (m.left(x), m.right(x)), left=linear(), right=linear()),
    "shielded": lambda: Model(shielded, router=linear(), middle=linear(), careful=Careful(4, 4)),
    "held": held,
    "flat": lambda: Model(flat, weight=nn.Parameter(torch.ones(4, 4)), below=nn.Sequential(linear(), nn.GELU())),
}


@cache
def captured(kind: str) -> Capture:
    """The capture of a kind of model, made once."""
    return capture_of(KINDS[kind](), torch.ones(2, 4))


def problem_of(
    capture: Capture, strategy: str, *, each: Contribution = NOTHING, cost: Cost | None = None, verdict: str = "safe"
) -> Problem:
    """A problem whose operations have the same contribution and verdict, and the same cost where one is given."""
    names = [*capture.nodes, *(place.name for place in capture.placeholders)]
    costs = costs_of(capture.graph_module.graph) if cost is None else dict.fromkeys(capture.nodes, cost)
    verdicts = dict.fromkeys(capture.nodes, Verdict(verdict, ""))
    return Problem(capture, costs, {"fp16": dict.fromkeys(names, each)}, verdicts, strategy, "fp16", "A100")


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
    return Problem(capture, costs, {"fp16": errors}, verdicts, strategy, "fp16", "A100")


def owners_of(capture: Capture) -> list[str]:
    """Scopes that have a say: the root, the owners of nodes, and modules that hold a tied weight."""
    tied = (path for place in capture.placeholders if len(place.holders) > 1 for path in place.holders)
    return sorted({"", *(node.owner for node in capture.nodes.values()), *tied})


def tied_owners(capture: Capture) -> list[tuple[str, ...]]:
    """Groups of owners that read or hold one stored tensor: under `cast` it has one precision."""
    stored = {placeholder.name for placeholder in capture.placeholders if placeholder.kind != "input"}
    return [
        owners
        for name, owners in Layout(capture, strategy_of("cast")).deciding_owners.items()
        if name in stored and len(owners) > 1
    ]


def fp32_of(labels: Mapping[str, str]) -> frozenset[str]:
    """What is FP32."""
    return frozenset(path for path, label in labels.items() if label == "fp32")


def labellings(owners: list[str]) -> Iterator[dict[str, str]]:
    """Every choice of precisions."""
    for labels in itertools.product(("fp16", "fp32"), repeat=len(owners)):
        yield dict(zip(owners, labels, strict=True))


def must_stay_fp32(problem: Problem) -> set[str]:
    """Owners of nodes that are unsafe in the format and that the strategy would lower."""
    resolution = problem.resolve(plain(problem.format))
    nodes = problem.capture.nodes
    return {nodes[name].owner for name in nodes if problem.is_forbidden(resolution, name)}
