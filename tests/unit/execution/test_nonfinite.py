"""The first operation of a low run that turns non-finite, and why: on functions whose arithmetic is worked out here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from auditor.execution.beside import first_non_finite
from auditor.execution.policy import Policy, plain
from auditor.records import NonFinite
from tests.support.capturing import Function, captured


def first(function: Callable[..., Tensor], *inputs: Tensor, strategy: str = "cast", fmt: str = "fp16"):
    model = Function(function)
    capture = captured(model, *inputs).capture
    how = Policy(capture, strategy, plain(fmt), fmt)
    return first_non_finite(capture, model, (inputs, {}), how)


def said(found: NonFinite | None):
    assert found is not None
    return found.op.split(".")[1], found.value, found.cause, found.begins_op.split(".")[1]


def variance(y: Tensor) -> Tensor:
    mean = y.mean(-1, keepdim=True)
    return torch.sqrt((y * y).mean(-1, keepdim=True) - mean * mean)


ROWS = 37.8671875 + torch.tensor([1.234375, -1.234375] * 8).repeat(2, 1)
"""In FP16 the squares are 1341 and 1528, their mean 1434; the mean rounds to 37.875, whose square is 1435: 1434 - 1435 < 0."""


def test_a_negative_variance_is_cancellation_where_the_difference_is() -> None:
    assert said(first(variance, ROWS)) == ("sqrt", "NaN", "cancellation", "sub")


def test_a_difference_that_vanishes_is_cancellation_and_of_the_divisor() -> None:
    x = torch.tensor([2048.25, 4096.5])  # units in the last place there are 2 and 4: both round to a multiple of 2
    assert said(first(lambda x: (x - x) / (x - x.floor()), x)) == ("div", "NaN", "cancellation", "sub")


def test_an_eps_that_vanishes_is_underflow() -> None:
    assert said(first(lambda x: torch.log(x + 1e-12), torch.zeros(4))) == ("log", "Inf", "underflow", "add")


def test_exponentials_that_all_vanish_are_underflow_where_they_do() -> None:
    found = first(lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True), torch.full((4,), -20.0))
    assert said(found) == ("div", "NaN", "underflow", "exp")  # exp(-20) is 2e-9, FP16 begins at 6e-8


def test_a_value_beyond_the_format_overflows_where_it_is_made() -> None:
    assert said(first(lambda x: x * x - 1.0, torch.full((4,), 300.0))) == ("mul", "Inf", "overflow", "mul")


def test_an_argument_that_rounds_out_of_the_domain_is_rounding() -> None:
    x = torch.tensor([0.99999])  # 1 in FP16, whose neighbours below 1 are 0.0005 apart
    assert said(first(lambda x: torch.atanh(x), x)) == ("atanh", "Inf", "rounding", "atanh")


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
