"""What an audit rests on, each held here once; docs/architecture.md says them in words."""

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import auditor
from auditor.artefact.strategies import SHIPPED
from auditor.emulation.emulate import Emulation
from auditor.errors import PlanError
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy
from auditor.execution.resolve import resolve
from auditor.features.training.backward import backward_errors
from auditor.features.training.objective import training_subject
from auditor.isolation import in_training
from auditor.loading import placement
from auditor.measure.attribute import estimate
from auditor.measure.measure import measure
from auditor.measure.probes import inner_products
from auditor.measure.probes import signs as drawn_signs
from auditor.numerics.formats import FORMATS as KNOWN
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.nodes import tensors_in
from auditor.numerics.operations import operation
from auditor.offload.files import OffloadMode, is_offloaded
from auditor.plan import plans
from auditor.plan.context import MeasuredModel, PlanningContext
from auditor.plan.problem import timed_in
from auditor.records import Audit, Capture, Contribution, Plan
from auditor.training.replay import bind_step, run_step
from auditor.training.step import capture_step, step_batches
from tests.support.fake_cuda import NAMES
from tests.support.problems import branches
from tests.support.replaying import Model
from tests.support.small_models import MODELS as SMALL
from tests.support.small_models import Deep, Regions
from tests.support.structure import modules, tree
from tests.support.subjects import FORMATS, capture_of, normal, seeded, subject_of
from tests.support.two_ways import Labels, drawn, emulated_answer, everything

# Every model run starts from the same state.

STAGE = [""]
FOUND: dict[str, set[tuple[float, ...]]] = defaultdict(set)
"""What runs find as they begin, by stage of the audit; nobody's state, so that nothing puts it back."""


class Counts(nn.Module):
    """Counts its calls, writes to a buffer, and draws from both generators."""

    calls = 0
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        FOUND[STAGE[0]].add((self.calls, float(self.mean.sum()), random.random(), float(torch.rand(()))))
        self.calls += 1
        x = torch.tanh(self.first(x))
        self.mean.add_(x.detach().mean(0).to(self.mean.dtype))
        return self.last(x - 0.1 * self.mean.to(x.dtype))


def test_every_run_of_every_stage_starts_from_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def entered(stage: str, *rest: Any) -> None:
        STAGE[0] = stage

    # The one place where a model is called again within a run, to see whether that makes a difference.
    monkeypatch.setattr(import_module("auditor.capture.capture"), "history_matters", lambda *rest: (False, None))
    FOUND.clear()
    batch, loss = (normal(16, 8), normal(16, 4, seed=1)), nn.functional.mse_loss
    tight = 1e-4  # plans are searched, run and made again
    auditor.audit(seeded(Counts), batch, mode="training", loss_fn=loss, max_error=tight, progress=entered)
    del FOUND[""]  # before the first stage it is seen to run, and no more
    assert {"capture", "measure", "training", "baseline", "plan", "low-precision steps"} <= FOUND.keys()
    assert len(set().union(*FOUND.values())) == 1, FOUND


# Only a policy says where casts are.


SOME: Mapping[str, tuple[type[nn.Module], tuple[Tensor, ...]]] = {
    **{name: SMALL[name] for name in ("transformer", "convnet", "mlp")},
    "branches": (branches, (normal(2, 4),)),
    "regions": (Regions, (normal(4, 6),)),
}


@cache
def known(name: str) -> tuple[nn.Module, Capture]:
    model = seeded(SOME[name][0])
    return model, capture_of(model, *SOME[name][1])


LEFT_OUT = {"getitem", "aten.detach.default", "aten.clone.default"}
"""Python's own, and what is done to outputs once the model has answered; no model here uses them. Casts are left out too."""


def compared(ran: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Operations with their dtypes, but those that only one side has."""
    return [(op.replace("_.", "."), dtype) for op, dtype in ran if op not in LEFT_OUT and not operation(op).cast]


def first_dtype(result: Any) -> str:
    return next((NAMES.get(x.dtype, "") for x in tensors_in(result)), "")


def of_the_executor(name: str, strategy: str, fmt: str, labels: Labels) -> dict[str, str]:
    """{operation: dtype of its result}, as the recording runs."""
    (model, captured), found = known(name), dict[str, str]()

    def note(node: fx.Node, result: Any) -> None:
        if node.op == "call_function":
            found[node.name] = first_dtype(result)

    how = Policy(captured, strategy, labels.__getitem__, fmt)
    with torch.no_grad():
        Executor(captured.graph_module, how, note).run(*captured.bind(model, (SOME[name][1], {})))
    return found


def of_the_runtime(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, fmt: str, labels: Labels
) -> list[tuple[str, str]]:
    """(operation, dtype of its result) of all that the patched model runs, in order."""
    (model, captured), found = known(name), list[tuple[str, str]]()
    run = Emulation.run_op

    def noted(self: Emulation, op: Any, *rest: Any) -> Any:
        result = run(self, op, *rest)
        found.append((str(op), first_dtype(result)))
        return result

    monkeypatch.setattr(Emulation, "run_op", noted)
    emulated_answer(model, captured, (SOME[name][1], {}), strategy, fmt, labels)
    return found


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("strategy", SHIPPED)
@pytest.mark.parametrize("name", SOME)
def test_executor_dtype_algebra_costs_and_runtime_agree_on_the_dtype_of_every_operation(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, fmt: str
) -> None:
    captured = known(name)[1]
    for labels in (everything(captured, fmt), drawn(captured, strategy, fmt, random.Random(1))):
        foretold = resolve(Policy(captured, strategy, labels.__getitem__, fmt))
        try:
            executed = of_the_executor(name, strategy, fmt, labels)
        except UnsupportedInFormat:
            assert foretold.conflicts
            continue
        assert not foretold.conflicts
        assert {node: foretold.dtypes[node] for node in executed} == executed
        assert {node: timed_in(foretold, node) for node in executed} == {
            node: (typed.kernel if typed.kernel != typed.dtype else dtype) or "fp32"
            for node, dtype in executed.items()
            for typed in [foretold.nodes[node]]
        }
        with monkeypatch.context() as patch:
            ran = of_the_runtime(patch, name, strategy, fmt, labels)
        assert compared(ran) == compared((captured.nodes[node].op, dtype) for node, dtype in executed.items())


# Predictions propose, runs dispose; and only a run of the artefact in a fresh process makes a plan verified.


def test_a_plan_that_is_predicted_to_hold_and_misses_is_never_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation is said to err by a millionth of what it does, and every replay to err by nothing."""
    measured: Any = PlanningContext.contributions
    verify, tried = plans.verify, list[Plan]()

    def flattered(contribution: Contribution) -> Contribution:
        return Contribution(contribution.isolated / 1e6, contribution.own / 1e6, contribution.cast / 1e6)

    def flattering(planning: PlanningContext) -> dict[str, dict[str, Contribution]]:
        return {fmt: {n: flattered(c) for n, c in by.items()} for fmt, by in measured.func(planning).items()}

    def noted(*args: Any) -> dict[str, Plan]:
        found = verify(*args)
        tried.extend(found.values())
        return found

    monkeypatch.setattr(PlanningContext, "contributions", property(flattering))
    monkeypatch.setattr(PlanningContext, "replay", lambda self, batches, how: 0.0)
    monkeypatch.setattr(plans, "verify", noted)
    budget = 3.5e-3  # missed where everything is low
    found = auditor.audit(seeded(lambda: Deep(12, 64)), normal(32, 64), formats="bf16", max_error=budget)
    missed = [plan for plan in tried if plan.predicted_error < budget < (plan.measured_error or 0.0)]
    assert not any(plan.is_verified for plan in missed)
    assert found.baselines.keys() == {"autocast_bf16", "cast_bf16"}
    for run in found.baselines.values():  # predicted to hold, as everything else
        assert run.measured_error is not None
        assert budget < run.measured_error
        assert not run.holds
    for plan in (*tried, *found.plans.values()):
        assert plan.is_verified == (plan.measured_error is not None and plan.measured_error <= budget)
    assert found.recommended is None or found.plans[found.recommended].is_verified


def audited_without_runs(monkeypatch: pytest.MonkeyPatch, why: str) -> Audit:
    """An audit whose artefacts, modules and programs alike, are never run."""

    monkeypatch.setattr(MeasuredModel, "ask", lambda planning, plans, *rest: dict.fromkeys(plans, why))
    return auditor.audit(
        seeded(lambda: Deep(3, 64)), normal(32, 64), formats="bf16", strategies=(*SHIPPED, "graph"), max_error=0.5
    )


def test_without_a_run_of_its_artefact_no_plan_is_verified_or_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audited_without_runs(monkeypatch, "RuntimeError: as this test has it")
    assert found.plans.keys() == {"autocast_bf16", "cast_bf16", "graph_bf16"}
    assert [plan.name for plan in found.plans.values() if plan.is_verified or plan.measured_error is not None] == []
    assert found.recommended is None


def test_where_a_run_was_cut_off_there_is_no_verdict_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="recommend neither a plan nor FP32"):
        audited_without_runs(monkeypatch, "not run, as this test has it")


def test_one_function_says_that_a_plan_is_verified_and_it_is_given_the_answer() -> None:
    """All others hand on what it said, or say that a plan is not."""
    said = {
        (name, ast.unparse(keyword.value))
        for name in modules()
        for call in ast.walk(tree(name))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "verification"
    }
    handed_on = ("plan.plans", "ran")
    assert said == {("plan.verified", "replace(ran, holds=holds)"), handed_on, ("document.live", "None")}


# Nothing the auditor computes writes into what it was given: all that calls operations in place is run on every dtype.


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOW = ("fp16", "bf16")


@contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """The tensors' values, and whether they want a gradient, are after the body what they were before it."""
    before = [(x.detach().clone(), x.requires_grad) for x in tensors]
    yield
    for x, (value, wanted) in zip(tensors, before, strict=True):
        torch.testing.assert_close(x.detach(), value, rtol=0, atol=0, equal_nan=True)
        assert x.requires_grad is wanted
        assert x.grad is None


def scaled(m: Any, x: Tensor) -> Tensor:
    """Reads its input, a weight and a buffer, and adds positions, which depend on no floating-point input."""
    y = m.linear(x.float()) * m.table
    return torch.softmax(y + torch.arange(4).to(x.dtype), -1) * y


def net(dtype: torch.dtype) -> tuple[nn.Module, Tensor, list[Tensor]]:
    """A model, its input, and every tensor that its owner holds."""
    model = seeded(lambda: Model(scaled, linear=nn.Linear(6, 4), table=normal(4, seed=2).to(dtype)))
    x = normal(3, 6).to(dtype)
    return model, x, [x, *model.parameters(), *model.buffers()]


def awkward(numbers: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Normal deviates with a zero, a subnormal number, and others that are not finite."""
    x = normal(numbers, seed=seed)
    x[:5] = torch.tensor([0.0, 1e-40, torch.inf, torch.nan, -torch.inf])
    return x.to(dtype)


def inner(dtype: torch.dtype) -> None:
    for other in (torch.float32, dtype):
        for error_of in (None, *(KNOWN[name] for name in LOW), KNOWN["fp32"]):
            for gradient, value in (
                (normal(2, 30).to(other), normal(2, 30).to(dtype)),
                (normal(1, 20_000).to(other), normal(1, 20_000).to(dtype)),
                (awkward(60, other), awkward(60, dtype)),
            ):
                with unchanged(gradient, value):
                    inner_products(gradient, value, 1, [error_of])


def signs(dtype: torch.dtype) -> None:
    x = awkward(40, dtype)
    with unchanged(x):
        drawn_signs(x, torch.Generator().manual_seed(0))


def measured(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    with unchanged(*held):
        captured = capture_of(model, x)
        found = measure(captured, model, ((x,), {}), LOW)
        kept = [value for value in found.values.values() if isinstance(value, Tensor)]
        with unchanged(*kept):
            estimate(found, 0)


def trained(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    target = normal(3, 4, seed=5).to(dtype)
    subject = training_subject(model, [(x, target)], {}, lambda output, target: (output - target).square().mean())
    with unchanged(target, *held), in_training(model):
        step = run_step(bind_step(capture_step(subject, LOW), subject, step_batches(subject)[0], 0))
        backward_errors(step, LOW)


def moved(dtype: torch.dtype) -> None:
    model, x, tensors = net(dtype)
    model.shift = normal(4).to(dtype)
    with unchanged(*tensors, model.shift):
        next(placement.move_subject(subject_of(model, x), "meta"))
        next(placement.move_subject(subject_of(model, x.clone().requires_grad_()), "meta"))


def spilt(dtype: torch.dtype) -> None:
    for x in (normal(600, 4000).to(dtype), normal(4000, 600).to(dtype).t()):
        with unchanged(x), OffloadMode():
            made = [x * 2, x.t().contiguous(), x.float(), x.contiguous(), x[1:, ::2] + 1]
        assert is_offloaded(made[0]) and is_offloaded(made[-1])


Case = Callable[[torch.dtype], None]

CASES: tuple[Case, ...] = (signs, measured, inner, moved, trained, spilt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_was_given_is_as_it_was(case: Case, dtype: torch.dtype) -> None:
    case(dtype)
