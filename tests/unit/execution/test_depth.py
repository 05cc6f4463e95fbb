"""A run under a plan beside one in FP32: errors along it, and the first operation that turns non-finite, and why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.execution.beside import UnderPlan, first_non_finite, under_plan
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, choice_from_scopes, plain
from auditor.loading import from_object
from auditor.numerics.metrics import relative_l2
from auditor.records import NonFinite, Plan, ScopeChoice
from tests.support.capturing import Function
from tests.support.capturing import captured as recorded
from tests.support.problems import Region
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded


def net() -> nn.Module:
    def forward(m: Any, x):
        scores = m.last(m.norm(torch.relu(m.first(x))))
        return scores, scores.argmax(-1)

    return Model(forward, first=nn.Linear(8, 16), norm=nn.LayerNorm(16), last=nn.Linear(16, 4))


def plan(strategy: str, fmt: str, **scopes: str) -> Plan:
    table = {path: ScopeChoice(precision) for path, precision in scopes.items()}
    return Plan(f"{strategy}_{fmt}", strategy, fmt, {"": ScopeChoice(fmt), **table}, 0.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    return from_object(net().eval(), torch.randn(5, 8))


@pytest.fixture(scope="module")
def captured(subject):
    return capture(subject, ("fp16", "bf16"))


def kept(captured, subject, how):
    """Every value of one run."""
    values = {}
    run = Executor(captured.graph_module, how, lambda n, value: values.update({n.name: value}))
    with torch.no_grad():
        run.run(*captured.bind(subject.model, subject.batches[0]))
    return values


@pytest.mark.parametrize(
    "chosen",
    [
        plan("autocast", "bf16"),
        plan("autocast", "fp16", norm="fp32"),
        plan("autocast", "fp16", last="fp32"),  # reads a low value
        plan("cast", "fp16"),
        plan("cast", "fp16", norm="fp32"),
        plan("cast", "bf16", first="fp32", last="fp32"),
    ],
    ids=lambda chosen: "-".join((chosen.name, *list(chosen.scopes)[1:])),
)
def test_errors_are_those_of_two_whole_runs(subject, captured, chosen):
    found = under_plan(captured, subject.model, subject.batches[0], chosen).errors
    how = Policy(captured, chosen.strategy, choice_from_scopes(chosen.scopes), chosen.format)
    low = kept(captured, subject, how)
    reference = kept(captured, subject, Policy.wide(captured))
    floating = [name for name, node in captured.nodes.items() if node.floating]
    assert list(found) == floating
    assert found == pytest.approx({name: relative_l2(reference[name], low[name]) for name in floating}, rel=1e-5)
    assert max(found.values()) > 1e-5


def test_a_plan_does_not_take_the_author_s_region_away():
    """The region is BF16 with a plan and without: nothing is lost there by the plan."""
    subject = from_object(seeded(Region), normal(4, 4))
    captured = capture(subject, ("bf16",))
    found = under_plan(captured, subject.model, subject.batches[0], plan("autocast", "bf16")).errors
    assert found["linear"] == 0 < found["linear_1"]


def test_a_plan_that_lowers_nothing_has_no_error(subject, captured):
    everything = plan("autocast", "bf16", first="fp32", norm="fp32", last="fp32")
    everything = Plan(**{**vars(everything), "scopes": {"": ScopeChoice("fp32")}})
    assert set(under_plan(captured, subject.model, subject.batches[0], everything).errors.values()) == {0.0}


def test_a_plan_that_cannot_run_has_no_errors():
    subject = from_object(Function(lambda x: torch.linalg.cholesky(x)), torch.eye(3))
    captured = capture(subject, ("fp16",))
    assert under_plan(captured, subject.model, subject.batches[0], plan("cast", "fp16")) == UnderPlan()


# The first operation of a low run that turns non-finite, and why: on functions whose arithmetic is worked out here.


def first(function: Callable[..., Tensor], *inputs: Tensor, strategy: str = "cast", fmt: str = "fp16"):
    model = Function(function)
    capture = recorded(model, *inputs).capture
    how = Policy(capture, strategy, plain(fmt), fmt)
    return first_non_finite(capture, model, (inputs, {}), how)


def said(found: NonFinite | None):
    return found.op.split(".")[1], found.value, found.cause, found.begins_op.split(".")[1]


def variance(y: Tensor) -> Tensor:
    mean = y.mean(-1, keepdim=True)
    return torch.sqrt((y * y).mean(-1, keepdim=True) - mean * mean)


ROWS = 37.8671875 + torch.tensor([1.234375, -1.234375] * 8).repeat(2, 1)
"""In FP16 the squares are 1341 and 1528, their mean 1434; the mean rounds to 37.875, whose square is 1435: 1434 - 1435 < 0."""


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (variance, ROWS, ("sqrt", "NaN", "cancellation", "sub")),
        # units in the last place there are 2 and 4: both round to a multiple of 2
        (lambda x: (x - x) / (x - x.floor()), [2048.25, 4096.5], ("div", "NaN", "cancellation", "sub")),
        (lambda x: torch.log(x + 1e-12), [0.0], ("log", "Inf", "underflow", "add")),
        # exp(-20) is 2e-9, FP16 begins at 6e-8
        (lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), 4 * [-20.0], ("div", "NaN", "underflow", "exp")),
        (lambda x: x * x - 1.0, [300.0], ("mul", "Inf", "overflow", "mul")),
        # 1 in FP16, whose neighbors below 1 are 0.0005 apart
        (lambda x: torch.atanh(x), [0.99999], ("atanh", "Inf", "rounding", "atanh")),
    ],
    ids=["variance", "divisor", "eps", "exponentials", "large", "out of the domain"],
)
def test_what_turns_non_finite_first_and_why(function: Callable[..., Tensor], inputs: Any, expected: Any) -> None:
    assert said(first(function, torch.as_tensor(inputs))) == expected


def test_what_is_finite_has_none() -> None:
    assert first(lambda x: x * x, torch.full((4,), 3.0)) is None


def test_the_mask_that_a_softmax_absorbs_is_not_what_turns_the_outputs() -> None:
    keep = torch.tensor([1.0, 1.0, 0.0])

    def attend(x: Tensor, keep: Tensor) -> Tensor:
        weights = torch.softmax(x + (1.0 - keep) * -1e6, -1)
        return torch.log(weights[..., :2] * 1e-12)

    assert said(first(attend, torch.zeros(2, 3), keep)) == ("log", "Inf", "underflow", "mul")


def test_what_an_operation_raises_ends_the_run_and_not_the_search() -> None:
    def raises(x: Tensor) -> Tensor:
        return torch.linalg.svd((x * x).reshape(2, 2)).S  # no half kernel

    assert said(first(raises, torch.full((4,), 300.0))) == ("mul", "Inf", "overflow", "mul")


@pytest.mark.parametrize("strategy", ["cast", "autocast"])
def test_either_strategy(strategy: str) -> None:
    weight = torch.eye(16)
    found = first(lambda x, w: variance(x @ w), ROWS, weight, strategy=strategy)
    assert said(found) == ("sqrt", "NaN", "cancellation", "sub")
