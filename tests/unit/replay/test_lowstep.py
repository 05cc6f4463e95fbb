"""What came of a low step: its error, worked out by hand, and what a scaler would do."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.replay.lowstep import LowStep, failed, gradient_error, unscaled

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
