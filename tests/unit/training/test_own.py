"""The user's own step, low: what `backward()` gives under the plan's islands, against FP32, and what it leaves behind."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.emulation.emulate import emulate
from auditor.features.training.measure import low_names
from auditor.features.training.objective import training_subject
from auditor.isolation import in_training
from auditor.records import Plan, ScopeChoice
from auditor.records.audit import Audit
from auditor.training.replay import Step, bind_step, gradient_error, run_step
from auditor.training.step import FP32, StepPrecision, capture_step, own_step, step_batches, use_own_gradients
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded


def island() -> nn.Module:
    """Activations of about 2000 pass a module that squares them: beyond 65504."""
    return Model(
        lambda m, x: m.last(m.energy(2000 * m.first(x))),
        first=nn.Linear(16, 32),
        energy=Function(lambda x: x / (x * x).mean(-1, keepdim=True).sqrt()),
        last=nn.Linear(32, 4),
    )


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(32, 16, seed=seed), torch.arange(32) % 4


def audited(**options: Any) -> Audit:
    return auditor.audit(seeded(island), batch(), mode="training", loss_fn=F.cross_entropy, device="cpu", **options)


@pytest.fixture(scope="module")
def under_autocast() -> Audit:
    return audited(strategies=("autocast",), formats=("fp16",))


def test_the_plans_islands_hold_in_the_low_step(under_autocast: Audit) -> None:
    plan = under_autocast.plans["autocast_fp16"]
    assert plan.is_verified
    assert plan.scopes["energy"].precision == "fp32"
    training = under_autocast.training
    assert training.plan == "autocast_fp16"
    assert training.errors["fp16"] == pytest.approx(4e-4, rel=0.8)
    assert training.fp16 is not None and training.fp16.init is not None
    assert training.format == "fp16"


SCOPES = {"": ScopeChoice("fp16"), "energy": ScopeChoice("fp32")}
PLAN = Plan("autocast_fp16", "autocast", "fp16", SCOPES, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("root", ["fp16", "fp32"])
def test_gradients_of_an_island_are_not_counted_as_low(root: str) -> None:
    model = seeded(island)
    scopes = {**SCOPES, "": ScopeChoice(root), "first": ScopeChoice("fp16")}
    with in_training(model):
        captured = capture_step(training_subject(model, batch(), {}, F.cross_entropy), ("fp16",))
    low = low_names(captured, "fp16", StepPrecision("fp16", replace(PLAN, scopes=scopes)).precision)
    found = {(captured.nodes[n].owner, captured.nodes[n].op.split(".")[1]) for n in low & captured.nodes.keys()}
    if root == "fp16":  # the quotient is FP32, and lowered for the last layer
        assert found == {("first", "linear"), ("", "mul"), ("energy", "div"), ("last", "linear")}
    else:
        assert found == {("first", "linear")}
    owners = {"first", "last"} if root == "fp16" else {"first"}
    weights = {place.fqn for place in captured.placeholders if place.name in low and place.kind == "parameter"}
    assert {name.partition(".")[0] for name in weights if name} == owners


def test_without_a_plan_to_train_under_the_step_is_plain_autocast() -> None:
    """A cast plan stores weights low and does not train; under plain autocast the squares overflow."""
    found = audited(strategies=("cast",))
    assert found.plans["cast_fp16"].is_verified
    training = found.training
    assert training.plan is None
    assert training.errors["fp16"] == pytest.approx(1.0, abs=0.01)  # everything is divided by infinity
    assert training.errors["bf16"] is not None and training.errors["bf16"] < 0.02
    assert training.format == "bf16"
    assert "by 100%" in training.recommendation


def step_of(model: nn.Module, data: Any, loss: Callable[..., Any] | None) -> Step:
    subject = training_subject(model, data, {}, loss)
    captured = capture_step(subject, ("fp16",), seed=5)
    return use_own_gradients(run_step(bind_step(captured, subject, step_batches(subject)[0], seed=5)))


def error_of(step: Step, low: StepPrecision, scale: float = 1024.0) -> float:
    found = own_step(step, low, scale)
    assert found.failure is None
    return gradient_error(step.by_parameter, found.gradients)


def test_the_gradients_are_those_of_the_models_own_backward() -> None:
    model, (x, y) = seeded(island), batch()
    with in_training(model):
        found = own_step(step_of(model, (x, y), F.cross_entropy), StepPrecision("fp16", PLAN), 1024.0)
    patched = auditor.apply(copy.deepcopy(model).train(), PLAN)
    with emulate("cuda"):
        loss = F.cross_entropy(patched(x).float(), y)
        (loss * 1024).backward()
    assert found.loss == float(loss.detach())
    for name, parameter in patched.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad / 1024), name


def test_a_value_behind_detach_is_detached_once() -> None:
    model = Model(lambda m, x: m.head((m.body(x).detach() * 2 + 1).tanh()), body=nn.Linear(8, 8), head=nn.Linear(8, 3))
    step = step_of(model, (normal(4, 8), normal(4, 3, seed=1)), F.cross_entropy)
    assert sum(node.op == "aten.detach.default" for node in step.capture.nodes.values()) == 1


def drawing(m: Any, x: Tensor) -> Tensor:
    """Draws in several ways, normalizes by the batch, and counts its calls."""
    m.calls += 1
    h = m.dropout(m.norm(m.first(x)).tanh())
    h = h + 0.1 * torch.randn_like(h)
    return F.dropout(m.last(h), 0.2, m.training).square().mean()


def test_the_low_step_draws_what_the_fp32_step_drew() -> None:
    def make() -> nn.Module:
        layers = {"first": nn.Linear(16, 64), "last": nn.Linear(64, 1), "norm": nn.BatchNorm1d(64)}
        return Model(drawing, **layers, dropout=nn.Dropout(0.4), calls=torch.zeros(()))

    model = seeded(make)
    before = copy.deepcopy(model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = torch.get_rng_state()
    with in_training(model):
        step = step_of(model, normal(64, 16), None)
        assert step.faithful
        assert 1e-5 < error_of(step, StepPrecision("fp16")) < 5e-3
        assert 1e-4 < error_of(step, StepPrecision("bf16"), 1.0) < 5e-2
        assert error_of(step, FP32, 1.0) == 0.0
        assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


def test_what_the_step_raises_is_its_failure() -> None:
    class Refusing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.dtype is not torch.float32:
                raise KeyError("no half here\nand more")
            return y.square().mean()

    model = Refusing(4, 4)
    with in_training(model):
        step = step_of(model, normal(3, 4), None)
        found = own_step(step, StepPrecision("fp16"))
    assert found.failure is not None and "no half here" in found.failure
    assert math.isnan(found.loss)
    assert found.gradients == {}
    assert type(model).forward is Refusing.forward and "forward" not in vars(model)


class Double(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_gradients_that_the_model_makes_itself_are_taken_from_its_own_backward() -> None:
    def own() -> nn.Module:
        return Model(lambda m, x: m.last(Double.apply(m.first(x))), first=nn.Linear(16, 8), last=nn.Linear(8, 4))

    (x, y), model = batch(), seeded(own)
    found = auditor.audit(model, (x, y), mode="training", loss_fn=F.cross_entropy, device="cpu").training
    assert found.errors["fp16"] is not None and found.errors["fp16"] < 1e-3
    assert found.attribution is not None and "autograd.Function" in found.attribution
    F.cross_entropy(model(x), y).backward()
    for parameter in found.parameters:
        expected = dict(model.named_parameters())[parameter.name].grad
        assert parameter.gradient.norm == pytest.approx(float(expected.norm()), rel=1e-4)
