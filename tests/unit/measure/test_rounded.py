"""Rounding on the way into a low operation, numbers of the formats worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from auditor.measure.rounded import rounder
from tests.capturing import Function
from tests.subjects import capture_of


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1)


@pytest.mark.parametrize(("fmt", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_ties_go_to_even_and_other_dtypes_stay(fmt: str, dtype: torch.dtype) -> None:
    rounds = rounder(capture_of(Function(lambda x: x * 2), torch.ones(2)), fmt)
    half = torch.finfo(dtype).eps / 2
    rounded = rounds({"x": torch.tensor([1 + half, 1 + 3 * half]), "i": torch.tensor([1]), "n": 7, "f": 1.1})
    # 1 + eps / 2 lies between 1 and 1 + eps and goes to 1; 1 + 3 eps / 2 goes to 1 + 2 eps
    assert rounded["x"].dtype is dtype
    assert rounded["x"].tolist() == [1.0, 1 + 4 * half]
    assert rounded["i"].dtype is torch.int64
    assert (rounded["n"], rounded["f"]) == (7, 1.1)
    assert rounds(torch.tensor([1.0], dtype=torch.float64)).dtype is torch.float64


def test_what_marks_a_mask_becomes_what_the_model_would_write_in_the_format() -> None:
    lowest = torch.finfo(torch.float32).min
    rounds = rounder(capture_of(Function(masked), torch.tensor([[1.0, -1.0]])), "fp16")
    # FP32's lowest number rounds to -inf in FP16, but Python would have written FP16's own lowest
    assert rounds(torch.tensor([lowest, 0.5])).tolist() == [-65504.0, 0.5]
    # a number next to it is no mark
    beside = math.nextafter(lowest, 0) * (1 - 2**-23)
    assert rounds(torch.tensor([beside])).tolist() == [-math.inf]


def test_without_such_a_literal_nothing_is_a_mark() -> None:
    rounds = rounder(capture_of(Function(lambda x: x * 2), torch.ones(2)), "fp16")
    assert rounds(torch.tensor([torch.finfo(torch.float32).min])).tolist() == [-math.inf]
