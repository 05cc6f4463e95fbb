"""No verdict by default: what first order cannot tell is run, at a bounded price; and predictions held against runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.measure import uncertain
from auditor.measure.attribute import first_order
from auditor.measure.calibrate import Calibration
from auditor.measure.measure import Measurement, measure
from auditor.measure.rerun import OutputMetric, Reruns
from auditor.records import Contribution, Linearity
from auditor.rulebook.verdicts import judge
from auditor.stages import Stages
from tests.support import planted
from tests.support.brute_force import true_isolated
from tests.support.capturing import Function
from tests.support.subjects import effects_of, measurement_of, normal, subject_of

BUDGET = 0.01


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the runs of each format cost, in runs of the whole model."""
    found: list[float] = []
    original = uncertain.FormatRuns.measure_unknown

    def counted(self: uncertain.FormatRuns) -> None:
        original(self)
        found.append(self.reruns.spent)

    monkeypatch.setattr(uncertain.FormatRuns, "measure_unknown", counted)
    return found


def measured_in(fmt: str, function: Callable[..., Any], *inputs: Tensor) -> Measurement:
    subject = subject_of(Function(function), *inputs)
    return measure(capture(subject, (fmt,)), subject.model, subject.batches[0], (fmt,))


def attributed(measured: Measurement) -> dict[str, Contribution]:
    (fmt,) = measured.formats
    return {name: found[fmt] for name, found in effects_of(measured, output_metric=OutputMetric(BUDGET)).items()}


def verdicts(measured: Measurement, contributions: dict[str, Contribution]) -> dict[str, str]:
    (fmt,) = measured.formats
    by_format = {name: {fmt: one} for name, one in contributions.items()}
    calibration = Calibration(measured.errors, by_format, measured.ranges, 1)
    judged = judge(measured.capture, calibration, (fmt,), BUDGET)
    return {name: found[fmt].verdict for name, found in judged.verdicts.items()}


HARMFUL = (3, 50, 86, 99)


def overflows(x: Tensor) -> Tensor:
    """100 squares of 300: each is infinite in FP16, and a clamp takes that away, but for four that are kept."""
    h, kept = x, []
    for i in range(100):
        square = h * h
        if i in HARMFUL:
            kept.append(square)
        h = square.clamp(max=300.0)
    return h + 1e-6 * sum(kept)


def test_a_hundred_overflows_are_each_run_at_the_price_of_a_few_runs(spent: list[float]) -> None:
    measured = measured_in("fp16", overflows, torch.tensor([[300.0, 200.0]]))
    found = attributed(measured)
    squares = [name for name in measured.capture.nodes if measured.errors[name]["fp16"].overflow][:100]
    assert len(squares) == 100
    said = verdicts(measured, found)
    assert [i for i, name in enumerate(squares) if said[name] == "unsafe"] == list(HARMFUL)
    assert {said[name] for i, name in enumerate(squares) if i not in HARMFUL} == {"safe"}
    assert not any(one.decided_by == "not-run" for one in found.values())
    for i in (*range(5, 100, 9), *HARMFUL):
        assert (true_isolated(measured, squares[i], "fp16") > BUDGET) == (i in HARMFUL), i
    assert spent[0] < 6


GENERATOR = torch.Generator().manual_seed(0)
SLOPES = (1 + 0.1 * torch.randn(200, generator=GENERATOR)).tolist()
SHIFTS = (0.1 * torch.randn(200, generator=GENERATOR)).tolist()


def classes(x: Tensor) -> Tensor:
    """400 operations, and an arg-max of what comes out."""
    for slope, shift in zip(SLOPES, SHIFTS, strict=True):
        x = x * slope + shift
    return x.argmax(-1)


@pytest.mark.parametrize(("rows", "gap", "most"), [(8, 0.5, 2), (8, 0.0, 96)])
def test_an_arg_max_over_many_operations(rows: int, gap: float, most: float, spent: list[float]) -> None:
    x = normal(rows, 6, seed=1)
    x[torch.arange(rows), x.argmax(-1)] += gap
    measured = measured_in("fp16", classes, x)
    found = attributed(measured)
    said = verdicts(measured, found)
    assert len(measured.capture.nodes) > 400
    checked = [name for name in [*measured.capture.nodes][::15] if said[name] != "untested"]
    assert len(checked) > 20
    for name in checked:
        true = true_isolated(measured, name, "fp16")
        assert (true > BUDGET) == (said[name] == "unsafe"), (name, true, found[name])
    assert spent[0] < most + 1


def test_of_two_thousand_classes_a_few_may_change(spent: list[float]) -> None:
    """One tie in some hundred rows is always near: what changes less than the budget's share is not unsafe."""

    def forward(x: Tensor) -> Tensor:
        for slope, shift in zip(SLOPES[:30], SHIFTS[:30], strict=True):
            x = x * slope + shift
        return x.argmax(-1)

    measured = measured_in("fp16", forward, normal(2048, 8, seed=1))
    found = attributed(measured)
    said = verdicts(measured, found)
    for name in [*measured.capture.nodes][::8]:
        true = true_isolated(measured, name, "fp16")
        assert true <= found[name].isolated <= BUDGET
        assert said[name] in ("safe", "sensitive")
    assert "safe" in said.values()
    assert not any(one.decided_by == "not-run" for one in found.values())
    assert spent[0] < 60


def test_what_the_runs_did_not_get_to_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncertain, "MAX_RUNS", 0)
    measured = measured_in("fp16", lambda x: (x * x).tanh(), torch.tensor([[300.0]]))
    found = attributed(measured)
    assert found["mul"].decided_by == "not-run"
    said = verdicts(measured, found)
    assert (said["mul"], said["tanh"]) == ("untested", "safe")


def test_what_the_code_computes_in_fp32_is_not_run(spent: list[float]) -> None:
    measured = measured_in("fp16", lambda x: (x.float() * x.float()).mean(-1).sqrt(), torch.full((2, 4), 300.0))
    found = attributed(measured)
    said = verdicts(measured, found)
    broken = [name for name, errors in measured.errors.items() if errors["fp16"].overflow]
    expected = dict.fromkeys(("mul", "mean", "sqrt"), ("not-run", "safe"))
    assert {name: (found[name].decided_by, said[name]) for name in broken} == expected
    assert spent == [0.0]


def test_a_group_that_does_no_harm_bounds_each_of_its_operations(spent: list[float]) -> None:
    def forward(x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x * 1.01 + 0.1).round(decimals=2)
        return x

    measured = measured_in("fp16", forward, 100 * normal(64, 8))
    found = attributed(measured)
    grouped = {name: one for name, one in found.items() if one.decided_by == "group"}
    assert len(grouped) > 8
    for name, one in grouped.items():
        assert true_isolated(measured, name, "fp16") <= one.isolated <= BUDGET
        assert 0 < one.own < one.isolated
        assert 1 < one.together <= len(grouped)
    assert spent[0] < 12


def test_operations_far_before_one_without_a_derivative_are_run() -> None:
    """First order says nothing of all that a rounding to whole numbers reads, however many operations before it."""

    def forward(x: Tensor) -> Tensor:
        y = x * 3.0
        for _ in range(6):
            y = y + 0.0001
        return y.floor() * 1.0

    measured = measured_in("bf16", forward, torch.tensor([[1.0, 1.3326, 2.0]]))
    found = attributed(measured)
    assert found["mul"].decided_by == "re-run"
    assert found["mul"].isolated == pytest.approx(true_isolated(measured, "mul", "bf16"))
    assert found["mul"].isolated > 0.1


# Predictions held against runs: what decides a verdict is run, and where first order does not hold, more is.


@dataclass(frozen=True)
class Held:
    """What predictions and runs say of a model. runs: how often the model was run in each format, by operations."""

    measured: Measurement
    first: dict[str, dict[str, Contribution]]
    found: dict[str, dict[str, Contribution]]
    checks: dict[str, Linearity]
    runs: dict[str, float]

    def floating(self) -> list[str]:
        """Operations with a result that a format rounds."""
        return [name for name, node in self.measured.capture.nodes.items() if node.floating]


def held(model: nn.Module, *inputs: Tensor, budget: float = BUDGET) -> Held:
    measured = measurement_of(model, *inputs)
    first = first_order(measured)
    runs: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:

        class Counted(Reruns):
            def together(self, names: Any) -> tuple[float, bool]:
                found = super().together(names)
                runs[self.format] = self.spent
                return found

        patch.setattr(uncertain, "Reruns", Counted)
        found, checks = uncertain.measure_uncertain(measured, first, OutputMetric(budget))
    return Held(measured, first.contributions, found, checks, runs)


@cache
def llama() -> Held:
    """Attention so sharp that its softmax saturates: there first order says up to five times too much."""
    with torch.random.fork_rng(devices=[]):
        model, inputs = planted.llama(4, **{**planted.REPAIRED, "sharp": 140.0})
    return held(model, *inputs)


@cache
def truths(fmt: str) -> dict[str, float]:
    """By brute force, of every other operation."""
    return {name: true_isolated(llama().measured, name, fmt) for name in llama().floating()[::2]}


@pytest.mark.slow
def test_where_first_order_fails_it_is_seen_and_what_is_said_to_break_the_budget_does() -> None:
    said, true = llama(), truths("bf16")
    wrong = [name for name in true if said.first[name]["bf16"].isolated > BUDGET >= true[name]]
    assert len(wrong) >= 3  # by first order alone
    claims = [name for name in true if said.found[name]["bf16"].isolated > BUDGET]
    assert len(claims) >= 12
    assert sum(true[name] <= BUDGET for name in claims) <= len(claims) / 50
    check = said.checks["bf16"]
    assert not check.holds
    assert check.refuted > 0
    assert check.most > 2
    assert said.runs["bf16"] <= uncertain.MAX_RUNS + 1


def chain(x: Tensor) -> Tensor:
    """Linear from end to end: 30 operations, each of which moves the outputs by about as much."""
    for _ in range(15):
        x = x * 1.013 + 0.037
    return x


def test_where_first_order_holds_few_runs_are_made() -> None:
    said = held(Function(chain), normal(64, 8), budget=1e-4)
    check = said.checks["bf16"]
    assert check.holds
    assert check.left > 0
    assert check.refuted == 0
    assert said.runs["bf16"] <= uncertain.TRUSTED + 1
    by = {said.found[name]["bf16"].decided_by for name in said.floating()}
    assert by == {"first-order", "re-run"}


def test_nothing_is_run_where_nothing_comes_near_the_budget() -> None:
    said = held(Function(chain), normal(64, 8), budget=0.5)
    assert said.checks == {}
    assert said.runs == {}
    assert said.found == said.first


def test_views_of_one_value_are_told_of_by_one_run() -> None:
    ticks: list[str] = []
    function = Function(lambda x: (x * 1.3).view(4, 2, 4).transpose(1, 2).unsqueeze(0) * 1.7)
    measured = measurement_of(function, normal(4, 8))
    first = first_order(measured)
    with Stages(lambda stage, detail, *_: ticks.append(detail))("measure", ""):
        found, _ = uncertain.measure_uncertain(measured, first, OutputMetric(1e-5))
    views = [name for name in measured.capture.nodes if name.startswith(("view", "transpose", "unsqueeze"))]
    assert len(views) == 3
    assert {found[name]["bf16"].decided_by for name in views} == {"re-run"}
    assert len({found[name]["bf16"].isolated for name in views}) == 1
    assert sum(name in views for name in ticks) == 2  # one in each format
    for name in views:
        assert found[name]["bf16"].isolated == pytest.approx(true_isolated(measured, name, "bf16"), rel=1e-5)
