"""A run under a plan beside one in FP32: errors along it, and the first operation that turns non-finite, and why."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.capture.capture import capture
from auditor.execution.beside import UnderPlan, first_non_finite, under_plan
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, choice_from_scopes, plain
from auditor.features.training.objective import training_subject
from auditor.isolation import in_training
from auditor.loading import from_object
from auditor.numerics.metrics import relative_l2
from auditor.records import NonFinite, Plan, ScopeChoice
from auditor.training.replay import (
    LowStep,
    bind_step,
    broken_gradients,
    failure_of_step,
    gradient_error,
    one_low,
    run_step,
    unscale,
)
from auditor.training.step import capture_step, step_batches
from tests.support.capturing import Function
from tests.support.capturing import captured as recorded
from tests.support.problems import with_region
from tests.support.replaying import Model
from tests.support.stepping import Scaled, stepped
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
    return from_object(seeded(net), normal(5, 8))


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
    subject = from_object(seeded(with_region), normal(4, 4))
    captured = capture(subject, ("bf16",))
    found = under_plan(captured, subject.model, subject.batches[0], plan("autocast", "bf16")).errors
    assert found["linear"] == 0 < found["linear_1"]


def test_a_plan_that_lowers_nothing_has_no_error(subject, captured):
    everything = replace(plan("autocast", "bf16"), scopes={"": ScopeChoice("fp32")})
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
        # the other entry is large, and is not what vanishes
        (lambda x: torch.log(x + 1e-12), [0.0, 20.0], ("log", "Inf", "underflow", "add")),
        # exp(-20) is 2e-9, FP16 begins at 6e-8
        (lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), 4 * [-20.0], ("div", "NaN", "underflow", "exp")),
        (lambda x: x * x - 1.0, [300.0], ("mul", "Inf", "overflow", "mul")),
        # 1 in FP16, whose neighbors below 1 are 0.0005 apart
        (lambda x: torch.atanh(x), [0.99999], ("atanh", "Inf", "rounding", "atanh")),
    ],
    ids=["variance", "divisor", "eps", "eps beside others", "exponentials", "large", "out of the domain"],
)
def test_what_turns_non_finite_first_and_why(function: Callable[..., Tensor], inputs: Any, expected: Any) -> None:
    assert said(first(function, torch.as_tensor(inputs))) == expected


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


# The recorded step has the gradients of the model's own ; low steps, worked out by hand.


Between = Callable[[Any, Tensor], Tensor]


def layers(between: Between) -> nn.Module:
    """Two layers with something between them."""
    parts = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 1), "mean": torch.zeros(4)}
    return Model(lambda m, x: m.second(between(m, m.first(x))).square().mean(), **parts)


def without_gradients(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().mean() + m.first.weight.norm()
    return h / scale


def tracking(m: Any, h: Tensor) -> Tensor:
    """A moving mean is kept by hand, and read at once."""
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.mean


def in_place(m: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, :2] *= 3
    return F.relu_(h)


def checkpointed(reentrant: bool) -> Between:
    """A reentrant one runs its forward in an autograd.Function."""
    return lambda m, h: checkpoint(lambda y: torch.tanh(y).exp(), h, use_reentrant=reentrant)


BETWEEN: dict[str, Between] = {
    "detached": lambda m, h: h * h.detach().exp(),
    "straight through": lambda m, h: h + (h.round() - h).detach(),
    "without gradients": without_gradients,
    "tracking": tracking,
    "checkpointed": checkpointed(False),
    "checkpointed twice": checkpointed(True),
    "dropping": lambda m, h: F.dropout(h, 0.5, m.training),
    "in place": in_place,
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_replay_has_the_gradients_of_the_run(kind: str) -> None:
    model, x = seeded(lambda: layers(BETWEEN[kind])), normal(6, 4)
    subject = training_subject(model, x, {}, None)
    with in_training(model):
        captured = capture_step(subject, (), seed=3)
        step = run_step(bind_step(captured, subject, step_batches(subject)[0], seed=3))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model(x).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(step.by_parameter[name], parameter.grad, rtol=1e-5, atol=1e-7), name
        assert bool(parameter.grad.any()) or name == "first.bias"


def test_a_step_runs_on_copies_of_what_the_model_holds() -> None:
    model = seeded(lambda: layers(in_place))
    model.first.bias.requires_grad_(False)
    subject = training_subject(model, normal(6, 4), {}, None)
    with in_training(model):
        captured = capture_step(subject, (), seed=3)
        step = bind_step(captured, subject, step_batches(subject)[0], seed=3)
    held = {x.data_ptr() for x in (*model.parameters(), *model.buffers())}
    assert held.isdisjoint(x.data_ptr() for x in step.flat if isinstance(x, Tensor))
    assert set(step.parameters) == {"first.weight", "second.weight", "second.bias"}  # a frozen one is no leaf of it


# Low steps: what came of one, and the recorded step with one operation low, or everything, worked out by hand.

U = 2.0**-7
REFERENCE = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0]), "unused": None}


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        ({"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}, 0.0),
        ({"a": torch.tensor([3.3]), "b": torch.tensor([0.0, 4.4])}, 0.1),  # (0.3, 0.4) of (3, 4)
        ({"a": torch.tensor([3.0]), "b": torch.tensor([math.inf, 4.0])}, math.inf),
        ({"a": torch.tensor([math.nan]), "b": torch.tensor([0.0, 4.0])}, math.inf),
    ],
)
def test_the_error_of_all_gradients_together(low: dict[str, torch.Tensor], expected: float) -> None:
    assert gradient_error(REFERENCE, low) == pytest.approx(expected)


def test_a_step_without_gradients_has_no_error() -> None:
    assert gradient_error({"a": torch.zeros(2), "b": None}, {"a": torch.zeros(2)}) == 0.0


def test_a_scaler_takes_finite_steps_only() -> None:
    assert LowStep(1.0, {"a": torch.ones(2), "b": None}).finite
    assert not LowStep(1.0, {"a": torch.tensor([1.0, math.nan])}).finite


def test_gradients_are_unscaled_in_fp32() -> None:
    # 2^-20 at a scale of 2^16 is 2^-4 in FP16; unscaled in FP16 it would lie among the subnormals
    found = unscale(torch.tensor([2.0**-4], dtype=torch.float16), 2.0**16)
    assert (found.dtype, found.item()) == (torch.float32, 2.0**-20)
    assert unscale(None, 2.0) is None


@pytest.mark.parametrize(("error", "words"), [(RuntimeError("first\nsecond"), "first"), (ValueError(), "ValueError")])
def test_a_step_that_raised(error: Exception, words: str) -> None:
    found = failure_of_step(error)
    assert (found.failure, found.gradients) == (words, {})
    assert math.isnan(found.loss)


def test_one_operation_low_forwards_and_backwards() -> None:
    # w gets 1.5 (1 + U), which BF16 takes from 1.5 + 1.5 U to 1.5 + 2 U; the loss, 1.5 (1 + U), is formed in FP32
    step = stepped(Scaled(), torch.tensor([1 + U]), torch.tensor([1.5]))
    names = [name for name, node in step.capture.nodes.items() if node.op == "aten.mul.Tensor"]
    low = one_low(step, names[0], "bf16", 2.0**12)
    assert (low.loss, low.gradients["w"].item()) == (1.5 + 1.5 * U, 1.5 + 2 * U)
    # the loss's own product rounds forwards, and hands 1.5 back as it is
    low = one_low(step, names[1], "bf16", 2.0**12)
    assert (low.loss, low.gradients["w"].item()) == (1.5 + 2 * U, 1.5 + 1.5 * U)
    assert step.by_parameter["w"].item() == 1.5 + 1.5 * U


def test_one_that_cannot_run_is_a_failure() -> None:
    model = Scaled(1.0, lambda y: torch.linalg.cholesky(y * torch.eye(2)))
    low = one_low(stepped(model, torch.tensor([4.0]), torch.tensor([1.0])), "linalg_cholesky", "fp16", 2.0**12)
    assert "kernel on CUDA" in low.failure


def test_the_operation_that_breaks_a_finite_gradient_is_named() -> None:
    # 1e-8 is zero in FP16, whose root is 0 and finite; the root's derivative there is not
    step = stepped(Scaled(1.0, Tensor.sqrt), torch.tensor([1e-8]), torch.tensor([1.0]))
    assert broken_gradients(step, "fp16") == {"sqrt": "w"}
    assert broken_gradients(step, "bf16") == {}


def test_where_the_loss_itself_is_not_finite_none_is_named() -> None:
    step = stepped(Scaled(12.0, Tensor.exp), torch.tensor([1.0]), torch.tensor([1.0]))
    assert broken_gradients(step, "fp16") == {}
