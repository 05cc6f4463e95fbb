"""Inputs that do not fit a format are an origin of their own: which columns, which strategies, and what NaN they cause."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.execution.beside import first_non_finite
from auditor.execution.policy import Policy, plain
from auditor.loading import from_object
from auditor.records import Audit, Finding
from auditor.report.origins import cause
from auditor.rulebook.inputs import cast_by, input_magnitudes
from auditor.rulebook.load import load_rules
from tests.rules.examples import example
from tests.rules.test_repairs import BUDGET, code_of, error, low, outputs
from tests.support.capturing import Function, captured
from tests.support.replaying import Model


class Table(nn.Module):
    """A ratio of raw columns, and a norm of all columns, as in credit scoring."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(columns), nn.Linear(columns + 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        ratio = (x[:, 1] - x[:, 2]) / x[:, 0]
        return self.body(torch.cat([self.norm(x), ratio[:, None]], 1))


def rows(*scales: float) -> Tensor:
    return (1 + torch.arange(8.0 * len(scales)).reshape(8, -1) % 5) * torch.tensor(scales)


def table(x: Tensor) -> nn.Module:
    model = Table(x.shape[1])
    model.norm.running_mean.copy_(x.mean(0))
    model.norm.running_var.copy_(x.var(0).clamp(max=60000.0))
    return model.eval()


def about_inputs(audit: Audit) -> list[Finding]:
    return [one for one in audit.findings if one.rule.startswith("INP")]


LARGE = rows(20000.0, 1e6, 1e6, 2.0)  # columns up to 1e5, 5e6, 5e6 and 10


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(table(LARGE), (LARGE,), formats="fp16")


def test_a_finding_names_the_input_its_columns_and_the_largest_value(audit: Audit) -> None:
    (one,) = about_inputs(audit)
    assert (one.rule, one.node, one.formats, one.agrees) == ("INP001", "x", ("fp16",), True)
    assert "`x` reaches 5e+06 in column 1 (columns 0, 1, 2 of 4)" in one.message
    assert "65504" in one.message and "with cast weights (not under autocast)" in one.message
    assert one.evidence["columns"] == (0, 1, 2)


def test_the_first_nan_of_a_run_is_named_with_the_input_as_its_cause(audit: Audit) -> None:
    first = audit.baselines["cast_fp16"].nonfinite
    assert (first.op, first.value, first.cause) == ("aten.sub.Tensor", "NaN", "overflow")  # Inf - Inf
    assert (first.begins, first.begins_op) == ("x", "input")
    assert cause(audit, first, "fp16").endswith("see INP001.")


def test_what_the_input_breaks_shares_its_cause(audit: Audit) -> None:
    (one,) = about_inputs(audit)
    broken = {finding.op for finding in audit.findings if finding.cause == one.cause and finding is not one}
    assert one.cause == "input x"
    assert {"aten.select.int", "aten.sub.Tensor", "aten.batch_norm.default"} & broken
    assert one.met == {"fp16": ("cast",)}


@pytest.mark.parametrize("scales", [(1.0, 1000.0, 0.5, 2.0), (100.0, 13000.0, 13000.0, 1.0)])
def test_inputs_that_fit_are_silent(scales: tuple[float, ...]) -> None:
    x = rows(*scales)
    assert about_inputs(auditor.audit(table(x), (x,), formats="fp16", strategies="cast")) == []


def test_an_input_that_a_linear_layer_reads_overflows_under_autocast_too() -> None:
    layer, x = nn.Linear(2, 3), torch.tensor([[70000.0, 1.0], [3.0, 2.0]])
    (one,) = about_inputs(auditor.audit(layer, (x,), formats="fp16"))
    assert "under autocast and with cast weights" in one.message and "column 0" in one.message
    audit = auditor.audit(layer, (x,), formats="fp16", strategies="autocast")
    first = audit.baselines["autocast_fp16"].nonfinite
    assert (first.op, first.begins_op) == ("aten.linear.default", "input")


def test_small_inputs_underflow() -> None:
    x = torch.tensor([[3e-9, 1.0], [2e-9, 2.0], [1e-9, 3.0]])
    model = Function(lambda x: (x[:, 0] * 1e9).tanh() + x[:, 1])
    (one,) = about_inputs(auditor.audit(model, (x,), formats="fp16", strategies="cast"))
    assert (one.rule, one.agrees) == ("INP002", True)
    assert "reaches 3e-09 in column 0 (column 0 of 2)" in one.message


class Weather(nn.Module):
    """Standardizes pressures and temperatures, and returns them in their units: its output's error is small."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([101325.0, 288.0])[:, None, None])
        self.register_buffer("deviation", torch.tensor([900.0, 12.0])[:, None, None])
        self.body = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = (x - self.mean) / self.deviation
        return (h + 0.1 * self.body(h)) * self.deviation + self.mean


def fields(spread: float) -> Tensor:
    noise = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    return noise * torch.tensor([spread, 12.0])[:, None, None] + torch.tensor([101325.0, 288.0])[:, None, None]


def test_an_input_whose_variation_rounding_removes_is_a_warning_though_the_output_is_within_the_budget() -> None:
    x = fields(900.0)
    audit = auditor.audit(Weather(), (x,), formats="bf16", strategies="cast")
    (one,) = about_inputs(audit)
    assert (one.rule, one.severity, one.formats) == ("INP003", "warning", ("bf16",))
    share = float((x[:, 0].bfloat16().double() - x[:, 0]).norm() / (x[:, 0] - x[:, 0].mean()).norm())
    assert 0.1 < share < 0.3
    assert f"in channel 0 (all 2 channels), where rounding to BF16 is {share:.0%} of its variation" in one.message
    assert audit.baselines["cast_bf16"].holds


@pytest.mark.parametrize("formats", ["fp16", "bf16"])
def test_variation_far_above_the_rounding_is_silent(formats: str) -> None:
    x = fields(900.0) / torch.tensor([1e5, 100.0])[:, None, None] % 1
    assert about_inputs(auditor.audit(Weather(), (x,), formats=formats, strategies="cast")) == []


def test_constant_columns_and_few_rows_have_no_variation_to_lose() -> None:
    model = Function(lambda x: (x - 2020.0).tanh())
    constant = torch.full((16, 2), 2020.3)
    assert about_inputs(auditor.audit(model, (constant,), formats="bf16")) == []
    few = 2020.0 + torch.arange(6.0).reshape(3, 2)
    assert about_inputs(auditor.audit(model, (few,), formats="bf16")) == []
    many = 2020.0 + torch.arange(16.0).reshape(8, 2) % 6
    assert [one.rule for one in about_inputs(auditor.audit(model, (many,), formats="bf16"))] == ["INP003"]


def test_an_input_that_no_operation_needs_is_a_note() -> None:
    x = torch.tensor([[3e-9, 1.0], [2e-9, 2.0], [1e-9, 3.0]])
    model = Function(lambda x: x.sum(-1))
    assert [one.severity for one in about_inputs(auditor.audit(model, (x,), formats="fp16"))] == ["info"]


def test_integers_and_bf16_are_not_spoken_of() -> None:
    model = Function(lambda x, ids: x * ids)
    given = torch.ones(2, 3), torch.tensor([100000, 3, 4])
    assert about_inputs(auditor.audit(model, given)) == []
    assert about_inputs(auditor.audit(table(LARGE), (LARGE,), formats="bf16")) == []


@pytest.mark.parametrize(
    ("shape", "axis", "dim"), [((8, 4), "column", 1), ((2, 4, 5, 6), "channel", 1), ((2, 9, 4), "column", 2)]
)
def test_columns_are_the_last_axis_and_channels_the_second(shape: tuple[int, ...], axis: str, dim: int) -> None:
    x = torch.ones(shape)
    x.select(dim, 3).mul_(1e5)
    model = Function(lambda x: x + 1)
    subject = from_object(model, [(x,), (2 * x,)])
    (found,) = input_magnitudes(captured(model, x).capture, subject)
    assert (found.name, found.axis, found.largest) == ("inputs_0", axis, (2.0, 2.0, 2.0, 2e5))


def test_strategies_that_cast_an_input() -> None:
    def strategies(function: Any, *inputs: Tensor) -> tuple[str, ...]:
        return cast_by(captured(Function(function), *inputs).capture, "inputs_0", "fp16")

    x = torch.ones(2, 2)
    assert strategies(lambda x: x + 1, x) == ("cast",)
    assert strategies(lambda x, y: x @ y, x, x) == ("autocast", "cast")


def test_the_trace_finds_no_input_where_an_operation_overflows() -> None:
    model, x = Function(lambda x: (x * 1000.0 - x * 1000.0) + x), torch.tensor([100.0, 3.0])
    capture = captured(model, x).capture
    first = first_non_finite(capture, model, ((x,), {}), Policy(capture, "cast", plain("fp16"), "fp16"))
    assert (first.op, first.begins_op, first.value) == ("aten.mul.Tensor", "aten.mul.Tensor", "Inf")


@pytest.mark.parametrize("code", ["INP001", "INP002", "INP003"])
@pytest.mark.parametrize("use", ["cast", "autocast"])
def test_the_advice_helps_if_the_input_is_passed_in_fp32(code: str, use: str) -> None:
    (rule,) = (rule for rule in load_rules() if rule.code == code)
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    fixed.load_state_dict(broken.state_dict())
    truth = outputs(broken, inputs)
    assert error(truth, outputs(fixed, inputs)) <= 1e-6
    with auditor.emulate("cuda"):
        if use == "cast":
            assert not error(truth, outputs(broken.half(), tuple(x.half() for x in inputs))) <= BUDGET
            assert error(truth, outputs(fixed.half(), inputs)) <= BUDGET
        else:
            with torch.autocast("cuda", dtype=torch.float16):
                assert error(truth, outputs(fixed, inputs)) <= BUDGET


USES = {
    "difference": (lambda x: (x[:, 1:] - x[:, :1]) / 1e6, LARGE),
    "logarithm": (lambda x: x[:, :3].log(), 3 * LARGE),
    "norm": (lambda x: F.layer_norm(x, x.shape[-1:])[:, :3], LARGE.flip(1)),
}


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize("use", ["cast", "autocast"])
def test_the_advice_helps_in_other_models(kind: str, use: str) -> None:
    (rule,) = (rule for rule in load_rules() if rule.code == "INP001")
    until_small, x = USES[kind]
    holder = Model(lambda m, x: m.body(until_small(x)), body=nn.Linear(3, 2))
    truth = outputs(holder, (x,))
    if use == "cast":
        assert not error(truth, low(holder, (x,), "fp16", "cast")) <= BUDGET
        holder.half()
    space: dict[str, Any] = {"torch": torch, "x": x, "self": holder, "until_small": until_small}
    with auditor.emulate("cuda"), torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=use == "autocast"):
        exec("\n".join(code_of(rule.advice)), space)
    assert error(truth, [space["y"]]) <= BUDGET


@pytest.mark.parametrize("strategy", ["cast", "autocast"])
def test_every_reporter_shows_an_input_that_a_plan_keeps_in_fp32(strategy: str) -> None:
    audit = auditor.audit(table(LARGE), (LARGE,), formats="fp16", strategies=strategy)
    assert all(text for text in audit.texts(".").values())


@pytest.mark.parametrize("code", ["INP001", "INP002"])
def test_the_example_is_reported(code: str) -> None:
    (rule,) = (rule for rule in load_rules() if rule.code == code)
    model, inputs = example(rule)
    assert [one.rule for one in about_inputs(auditor.audit(model, inputs, formats="fp16"))] == [code]
