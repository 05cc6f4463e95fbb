"""Random models: programs of parts and blocks that hypothesis draws, and what every audit of one must come to."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.errors import AuditorError
from auditor.records import Audit
from tests.any_model import dtype_parts, more_parts, parts
from tests.any_model.holding import held
from tests.any_model.parts import Part, linear

TABLES = {
    "modules": parts.MODULES,
    "functions": parts.FUNCTIONS,
    "scales": parts.SCALES,
    "python": more_parts.PYTHON,
    "writes": more_parts.WRITES,
    "state": more_parts.STATE,
    "dtypes": dtype_parts.DTYPES,
}
PARTS = {name: make for table in TABLES.values() for name, make in table.items()}
BLOCKS = ("residual", "twice", "sequential", "scope", "unrolled", "remembered", "detached", "mixed", "early", "vmapped")
VARIANTS = 8
EXAMPLES = 6
"""Draws of a quick test."""

DESERVED = {"nan-output", "nothing-to-audit", "capture-failed"}
"""What some models are refused for."""

MOSTLY = 0.95
"""Share of the models that run which must end in an audit."""

OUTPUTS = ("tensor", "tuple", "dict", "nested", "dataclass", "named", "list", "with a view")
INPUTS = ("rows", "keywords", "dict", "tokens", "with a mask", "a pair", "without a batch", "not contiguous", "grown")


@dataclass(frozen=True)
class Step:
    """A part, or a block around further steps."""

    name: str
    variant: int
    inside: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """What a model is made of, and how it is called and audited."""

    steps: tuple[Step, ...]
    inputs: str = "rows"
    outputs: str = "tensor"
    rows: int = 4
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """What some models return, which nothing registers with torch."""

    first: Tensor
    others: list[Tensor]
    note: str = "an answer"


class Block(nn.Module):
    """Steps that share a module, and how they are run."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.kind = step.name
        self.steps: list[Part] = [made(inner) for inner in step.inside]
        self.held = nn.ModuleList(part for part in self.steps if isinstance(part, nn.Module))
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "residual":
            return h + self.run(h)
        if self.kind == "twice":
            return self.run(self.run(h))
        if self.kind == "unrolled":
            for _ in range(3):
                h = self.run(h) * self.gate
            return h
        if self.kind == "remembered" and h.requires_grad:
            return checkpoint(self.run, h, use_reentrant=False)
        if self.kind == "detached":
            with torch.no_grad():
                return self.run(h.detach())
        if self.kind == "mixed":
            with torch.autocast("cuda", dtype=torch.bfloat16):
                h = self.run(h)
            return h.float()
        if self.kind == "vmapped":
            mapped: Tensor = torch.vmap(self.run)(h[None])[0]
            return mapped
        if self.kind == "early":
            for part in self.steps:
                h = part(h)
                if float(h.detach().mean()) > 0.2:
                    return h
            return h
        return self.run(h)

    def run(self, h: Tensor) -> Tensor:
        for part in self.steps:
            h = part(h)
        return h


def made(step: Step) -> Part:
    if step.name not in BLOCKS:
        return PARTS[step.name](step.variant)
    block = Block(step)
    if step.name == "sequential" and all(isinstance(part, nn.Module) for part in block.steps):
        return nn.Sequential(*block.held)
    return block


class Drawn(nn.Module):
    """A program as a model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inputs, self.outputs = program.inputs, program.outputs
        self.entry = nn.Embedding(16, 8) if program.inputs == "tokens" else linear()
        self.body = Block(Step("scope", 0, program.steps))
        self.head = linear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        h = self.head(self.body(self.read(*args, **kwargs)))
        return self.written(h)

    def read(self, *args: Any, **kwargs: Any) -> Tensor:
        x: Any = args[0] if args else kwargs["x"]
        if self.inputs == "dict":
            return self.entry(x["x"]) * x["weight"]
        if self.inputs == "tokens":
            return self.entry(x).mean(1)
        if self.inputs == "with a mask":
            return self.entry(x).masked_fill(~kwargs["mask"], 0.0)
        if self.inputs == "a pair":
            return self.entry(x[0]) + x[1]
        if self.inputs == "without a batch":
            return self.entry(x)[None]
        if self.inputs == "grown":
            return x.clone()
        return self.entry(x)

    def written(self, h: Tensor) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            "tuple": lambda: (h, h.mean(), None),
            "dict": lambda: {"logits": h, "classes": h.argmax(-1)},
            "nested": lambda: {"all": [h, (h.softmax(-1), {"mean": h.mean(0)})], "name": "x"},
            "dataclass": lambda: Answer(h, [h.sum(-1)]),
            "named": lambda: torch.max(h, -1),
            "list": lambda: list(h.unbind(0)),
            "with a view": lambda: (h, h[:, 0]),
        }
        return makers[self.outputs]() if self.outputs in makers else h


def call_of(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(program.rows, 8)
    calls: dict[str, Callable[[], Any]] = {
        "keywords": lambda: ((), {"x": x}),
        "dict": lambda: (({"x": x, "weight": torch.rand(program.rows, 1)},), {}),
        "tokens": lambda: ((torch.randint(0, 16, (program.rows, 3)),), {}),
        "with a mask": lambda: ((x,), {"mask": torch.rand(program.rows, 8) > 0.3}),
        "a pair": lambda: (((x, torch.randn(8)),), {}),
        "without a batch": lambda: ((torch.randn(8),), {}),
        "not contiguous": lambda: ((torch.randn(8, program.rows).t(),), {}),
    }
    return calls[program.inputs]() if program.inputs in calls else ((x,), {})


def built(program: Program) -> tuple[nn.Module, Any]:
    """The model and its call, the same every time."""
    torch.manual_seed(program.seed)
    return Drawn(program).eval(), call_of(program)


def programs(*tables: str) -> st.SearchStrategy[Program]:
    """Programs whose parts come from some tables more often than from the others."""
    names = [name for table in tables for name in TABLES[table]]
    leaf = st.builds(Step, st.sampled_from(names) | st.sampled_from(sorted(PARTS)), st.integers(0, VARIANTS - 1))
    block = st.builds(Step, st.sampled_from(BLOCKS), st.just(0), st.lists(leaf, min_size=1, max_size=2).map(tuple))
    outer = st.builds(
        Step, st.sampled_from(BLOCKS), st.just(0), st.lists(leaf | block, min_size=1, max_size=1).map(tuple)
    )
    ways = st.sampled_from((("autocast",), ("cast",), ("autocast", "cast")))
    kinds = st.sampled_from((("fp16",), ("bf16",), ("fp16", "bf16")))
    options = st.fixed_dictionaries(
        {"strategies": ways, "formats": kinds, "max_error": st.sampled_from((0.01, 0.01, 1e-3, 0.1))}
    )
    return st.builds(
        Program,
        st.lists(leaf | leaf | block | outer, min_size=1, max_size=3).map(tuple),
        st.just("rows") | st.sampled_from(INPUTS),
        st.just("tensor") | st.sampled_from(OUTPUTS),
        st.sampled_from((4, 1, 3, 6)),
        st.integers(0, 3),
        options,
    )


def runs(program: Program) -> bool:
    """Whether the model runs as its user runs it; what does not is none of the auditor's business."""
    with torch.random.fork_rng(devices=[]):
        try:
            model, (args, kwargs) = built(program)
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception:
            return False
    return True


def outcome(program: Program) -> str:
    """The slug of a refusal, or "audited": after that all promises were kept. "no run": the model itself raises."""
    if not runs(program):
        return "no run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            audit = held(lambda: built(program), some_plan_verified=False, **program.options)
        except AuditorError as error:
            if "\n" in str(error) or not error.slug:
                raise
            return error.slug
    complete(audit)
    return "audited"


def complete(audit: Audit) -> None:
    """Every node has a verdict with a reason, and every plan an error or the reason why not."""
    for report in audit.nodes:
        for verdict in report.verdicts.values():
            assert verdict.verdict and (verdict.reason or verdict.verdict == "safe"), report.node
            assert "internal error" not in verdict.reason
    for plan in audit.plans.values():
        assert (
            plan.verified
            or plan.measured_error is not None
            or plan.verification.failure
            or not plan.verification.finite
        )


def mostly_audited(found: Counter[str]) -> None:
    """Refusals are rare, and of kinds that a model can deserve."""
    ran = found.total() - found["no run"]
    assert ran >= 0.7 * found.total(), found
    assert found["audited"] + found["nan-output"] >= MOSTLY * ran, found
    assert found["audited"] >= 0.8 * ran, found
    assert set(found) <= {"audited", "no run"} | DESERVED, found


def audited(tables: Iterable[str], examples: int, start: int | None = None) -> Counter[str]:
    """How many of some draws came to what. start: a seed of their own; without one they are the same every time."""
    found: Counter[str] = Counter()

    def one(program: Program) -> None:
        found[outcome(program)] += 1

    quiet = list(HealthCheck)
    phases = (Phase.generate, Phase.shrink)
    options = settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=quiet,
        database=None,
        phases=phases,
        derandomize=start is None,
        print_blob=False,
    )
    test = options(given(programs(*tables))(one))
    (test if start is None else seed(start)(test))()
    return found
