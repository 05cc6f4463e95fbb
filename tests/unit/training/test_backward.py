"""The backward pass of one operation alone in a format, on steps small enough for every number to be worked out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.records import NodeError
from auditor.training.backward import Tested, backward_errors
from tests.stepping import Scaled, stepped

U = 2.0**-7
"""Spacing of BF16 above 1."""


def backwards(model: Scaled, x: list[float], targets: list[float], packet: str, fmt: str) -> Tested:
    step = stepped(model, torch.tensor(x), torch.tensor(targets), (fmt,))
    return backward_errors(step, (fmt,))[packet][fmt]


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**60])
def test_a_product_hands_back_one_rounding_at_whatever_size(size: float) -> None:
    # w gets 1.5 (1 + U) = 1.5 + 1.5 U, a tie, which BF16 takes to 1.5 + 2 U
    found = backwards(Scaled(), [1 + U], [1.5 * size], "mul", "bf16")
    assert found.error.local_error == pytest.approx(0.5 * U / (1.5 + 1.5 * U), rel=1e-6)
    assert (found.error.overflow, found.error.nan, found.error.unsupported, found.reaches) == (0, 0, None, None)
    handed = found.handed
    assert handed is not None
    (gap,) = handed.gradients  # x wants none
    assert handed.sources == (("p_model_w", 0),)
    assert gap is not None
    assert float(gap) == 0.5 * U * size
    (result,) = handed.results
    assert result is not None
    assert float(result) == 0.0  # forwards, 1 + U is a value of BF16


def test_an_exact_way_back() -> None:
    assert backwards(Scaled(), [2.0], [0.5], "mul", "bf16").error == NodeError(local_error=0.0)


def test_a_gradient_that_overflows_names_the_weight_that_it_reaches() -> None:
    # d exp(y) = exp(y), and exp(12) = 162755 is beyond FP16
    found = backwards(Scaled(12.0, Tensor.exp), [1.0], [1.0], "exp", "fp16")
    assert (found.error.overflow, found.error.nan, found.reaches) == (1, 0, "w")
    found = backwards(Scaled(12.0, Tensor.exp), [1.0], [1.0], "exp", "bf16")
    assert (found.error.overflow, found.error.nan, found.reaches) == (0, 0, None)


def test_infinite_and_undefined_gradients_are_told_apart() -> None:
    # sqrt(x^2) at 1e-5: x^2 is 1e-10, zero in FP16, where the root's derivative is infinite, and zero times that is NaN
    found = backwards(Scaled(1e-5, lambda y: y.square().sqrt()), [1.0], [1.0], "sqrt", "fp16")
    assert (found.error.overflow, found.error.nan) == (1, 0)


def test_what_has_no_kernel_says_so() -> None:
    model = Scaled(1.0, lambda y: torch.linalg.cholesky(y * torch.eye(2)))
    found = backwards(model, [4.0], [1.0], "linalg_cholesky", "fp16")
    assert found.error.unsupported is not None
    assert "kernel on CUDA" in found.error.unsupported
    assert (found.error.local_error, found.handed) == (None, None)
