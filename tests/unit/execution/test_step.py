"""The recorded step has the gradients of the model's own ; low steps, worked out by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.execution.step import (
    LowStep,
    bind_step,
    broken_gradients,
    failure_of_step,
    gradient_error,
    one_low,
    run_step,
    unscale,
)
from auditor.training.objective import in_training, training_subject
from auditor.training.step import capture_step, step_batches
from tests.support.replaying import Model
from tests.support.stepping import Scaled, stepped
from tests.support.subjects import normal, seeded

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
