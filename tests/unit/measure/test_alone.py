"""One operation alone: what enters it, and where its error comes from; numbers of the formats worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from auditor.measure.alone import Trace, rounder
from auditor.measure.measure import Measurement
from tests.support.capturing import Function
from tests.support.subjects import capture_of, measurement_of, only


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


U = 2.0**-7
"""Spacing of BF16 above 1."""


def trace(function: object, *inputs: Tensor, packet: str, fmt: str = "bf16") -> Trace:
    return trace_in(measurement_of(Function(function), *inputs), packet, fmt)  # type: ignore[arg-type]


def trace_in(measured: Measurement, packet: str, fmt: str = "bf16") -> Trace:
    return measured.traces[only(measured.capture, packet).name][fmt]


def errors(measured: Measurement, packet: str) -> dict[str, list[float]]:
    """In BF16, of the first tensor of a node, those that a run tells."""
    node = measured.nodes[only(measured.capture, packet).name]
    found = measured.alone["bf16"].errors(node, trace_in(measured, packet), 0)
    return {kind: error.reshape(-1).tolist() for kind, error in found}


def test_a_view_adds_nothing_and_carries_the_rounding_of_what_it_views() -> None:
    found = trace(lambda x: (x * 1.0).view(2, 1), torch.tensor([1.0, 1 + U / 4]), packet="view")
    assert (found.isolated, found.own) == ("rounding", "none")


@pytest.mark.parametrize(
    ("packet", "move"),
    [
        ("cat", lambda x: torch.cat([x, x])),
        ("flip", lambda x: x.flip(0)),
        ("roll", lambda x: x.roll(1, 0)),
        ("gather", lambda x: x.gather(0, torch.tensor([1, 1]))),
    ],
)
def test_what_moves_entries_is_rounded_and_no_more(packet: str, move: object) -> None:
    found = trace(lambda x: move(x * 1.0), torch.tensor([1 + U / 4, 3.0]), packet=packet)  # type: ignore[operator]
    assert (found.isolated, found.own) == ("rounding", "none")


def test_an_operation_that_rounds_its_result_once() -> None:
    # 1.5 (1 + U) = 1.5 + 1.5 U lies between 1.5 + U and 1.5 + 2 U, a tie that goes to the even 1.5 + 2 U: off by U / 2
    measured = measurement_of(Function(lambda x: x * 1.5), torch.tensor([1 + U]))
    assert trace_in(measured, "mul").own == "rounding"
    assert errors(measured, "mul") == {"isolated": [U / 2]}


def test_an_exact_operation_on_rounded_inputs() -> None:
    # x = 1 + U / 4 is rounded to 1, and twice that is exact: all of the error comes in from outside;
    # 2 + U / 2 rounds to 2 as well: rounding the result is all that happens
    assert trace(lambda x: x + x, torch.tensor([1 + U / 4]), packet="add") == Trace("rounding", "none")
    # 1 + 0.75 U goes to 1 + U: of the difference 0.75 U is right and U is left, which BF16 holds
    measured = measurement_of(Function(lambda x: x - 1.0), torch.tensor([1 + 0.75 * U]))
    assert trace_in(measured, "sub").own == "none"
    assert errors(measured, "sub") == {"isolated": [0.25 * U]}


def test_what_rounds_more_than_once_is_held_against_the_exact_result() -> None:
    x = torch.cat([torch.ones(1), torch.full((64,), U / 4)])  # each sum rounds back to 1
    measured = measurement_of(Function(lambda x: x.cumsum(0)), x)
    found = errors(measured, "cumsum")
    assert trace_in(measured, "cumsum") == Trace("run", "run")
    assert found["own"][-1] == pytest.approx(found["isolated"][-1])
    assert found["own"][-1] < -U
