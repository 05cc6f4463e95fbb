"""Low steps: what came of one, and the recorded step with one operation low, or everything, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from auditor.execution.step import LowStep, failed, gradient_error, one_low, spoilt, unscaled
from tests.support.stepping import Scaled, stepped

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
    found = unscaled(torch.tensor([2.0**-4], dtype=torch.float16), 2.0**16)
    assert found is not None
    assert (found.dtype, found.item()) == (torch.float32, 2.0**-20)
    assert unscaled(None, 2.0) is None


@pytest.mark.parametrize(("error", "words"), [(RuntimeError("first\nsecond"), "first"), (ValueError(), "ValueError")])
def test_a_step_that_raised(error: Exception, words: str) -> None:
    found = failed(error)
    assert (found.failure, found.gradients) == (words, {})
    assert math.isnan(found.loss)


def test_one_operation_low_forwards_and_backwards() -> None:
    # w gets 1.5 (1 + U), which BF16 takes from 1.5 + 1.5 U to 1.5 + 2 U; the loss, 1.5 (1 + U), is formed in FP32
    step = stepped(Scaled(), torch.tensor([1 + U]), torch.tensor([1.5]))
    names = [name for name, node in step.capture.nodes.items() if node.op == "aten.mul.Tensor"]
    low = one_low(step, names[0], "bf16")
    assert (low.loss, low.gradients["w"].item()) == (1.5 + 1.5 * U, 1.5 + 2 * U)
    # the loss's own product rounds forwards, and hands 1.5 back as it is
    low = one_low(step, names[1], "bf16")
    assert (low.loss, low.gradients["w"].item()) == (1.5 + 2 * U, 1.5 + 1.5 * U)
    assert step.by_parameter["w"].item() == 1.5 + 1.5 * U


def test_one_that_cannot_run_is_a_failure() -> None:
    model = Scaled(1.0, lambda y: torch.linalg.cholesky(y * torch.eye(2)))
    low = one_low(stepped(model, torch.tensor([4.0]), torch.tensor([1.0])), "linalg_cholesky", "fp16")
    assert low.failure is not None
    assert "kernel on CUDA" in low.failure


def test_the_operation_that_breaks_a_finite_gradient_is_named() -> None:
    # 1e-8 is zero in FP16, whose root is 0 and finite; the root's derivative there is not
    step = stepped(Scaled(1.0, Tensor.sqrt), torch.tensor([1e-8]), torch.tensor([1.0]))
    assert spoilt(step, "fp16") == {"sqrt": "w"}
    assert spoilt(step, "bf16") == {}


def test_where_the_loss_itself_is_not_finite_none_is_named() -> None:
    step = stepped(Scaled(12.0, Tensor.exp), torch.tensor([1.0]), torch.tensor([1.0]))
    assert spoilt(step, "fp16") == {}
