"""Operations in a format without arithmetic: float32 in between, results rounded, promotion as torch has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.numerics.casting import format_in, in_format
from auditor.numerics.formats import FORMATS
from auditor.numerics.kernels import asks_for_rounding, promoted, rounding
from auditor.trees import tensors_in

aten = torch.ops.aten
E5M2, E4M3 = FORMATS["fp8_e5m2"], FORMATS["fp8_e4m3"]


def low(*values: float, row: Any = E5M2) -> Tensor:
    return in_format(torch.tensor(values), row)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("fp8_e5m2", False)], "fp8_e5m2"),
        ([("fp8_e5m2", False), ("fp32", False)], "fp32"),
        ([("fp8_e5m2", False), ("fp32", True)], "fp8_e5m2"),  # a scalar has no say beside a tensor
        ([("fp8_e5m2", True), ("fp32", True)], "fp32"),
        ([("fp8_e5m2", False), ("fp8_e4m3", False)], "fp32"),
        ([("fp16", False), ("bf16", False)], "fp32"),
        ([("bf16", False), ("fp64", False)], "fp64"),
    ],
)
def test_promotion(given: Sequence[tuple[str, bool]], expected: str) -> None:
    assert promoted(given) == expected


def test_a_result_is_rounded_once() -> None:
    # 1.25 * 1.5 = 1.875, between 1.75 and 2, a tie that goes to the even 2; 1.25 + 1.25 = 2.5 is a value
    found = rounding(aten.mul.Tensor, (low(1.25), low(1.5)), {})
    assert (found.tolist(), format_in(found)) == ([2.0], E5M2)
    assert rounding(aten.add.Tensor, (low(1.25), low(1.25)), {}).tolist() == [2.5]


def test_a_sum_is_formed_in_float32() -> None:
    # 8 + 8 times 0.25: adding up in two fraction bits would stay at 8
    found = rounding(aten.sum.default, (low(8.0, *[0.25] * 8),), {})
    assert found.item() == 10.0


def test_beside_float32_and_beside_another_format_it_is_float32() -> None:
    for other in (torch.tensor([1.3]), low(1.25, row=E4M3)):
        found = rounding(aten.mul.Tensor, (low(1.25), other), {})
        assert format_in(found) is FORMATS["fp32"]


def test_a_format_in_the_place_of_a_dtype_is_what_comes_out() -> None:
    found = rounding(aten.to.dtype, (torch.tensor([1.3]), E5M2), {})
    assert (found.tolist(), format_in(found)) == ([1.25], E5M2)
    raised = rounding(aten.to.dtype, (low(1.25), torch.float32), {})
    assert format_in(raised) is FORMATS["fp32"]
    summed = rounding(aten.sum.default, (low(1.25, 1.5),), {"dtype": torch.float32})
    assert (summed.item(), format_in(summed)) == (2.75, FORMATS["fp32"])


def test_discrete_results_stay() -> None:
    found = rounding(aten.argmax.default, (low(1.0, 2.0),), {})
    assert (found.item(), found.dtype) == (1, torch.int64)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((torch.ones(1),), {}, False),
        ((torch.ones(1).half(),), {}, False),
        ((in_format(torch.ones(1), E5M2),), {}, True),
        (([torch.ones(1), in_format(torch.ones(1), E5M2)],), {}, True),
        ((torch.ones(1),), {"dtype": E5M2}, True),
    ],
)
def test_who_asks_for_it(args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool) -> None:
    assert asks_for_rounding(tensors_in((args, kwargs)), args, kwargs) is expected
