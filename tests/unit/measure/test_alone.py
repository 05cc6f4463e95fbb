"""One operation alone, and one format node after node: errors, where they are born, and what attribution is handed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.measure.alone import Trace, rounder
from auditor.records import NodeError
from tests.support.capturing import Function
from tests.support.subjects import capture_of, measurement_of


def test_what_marks_a_mask_becomes_what_the_model_would_write_in_the_format() -> None:
    lowest = torch.finfo(torch.float32).min
    masked = Function(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1))
    rounds = rounder(capture_of(masked, torch.tensor([[1.0, -1.0]])), "fp16")
    # FP32's lowest number rounds to -inf in FP16, but Python would have written FP16's own lowest
    assert rounds(torch.tensor([lowest, 0.5])).tolist() == [-65504.0, 0.5]
    # a number next to it is no mark
    beside = math.nextafter(lowest, 0) * (1 - 2**-23)
    assert rounds(torch.tensor([beside])).tolist() == [-math.inf]


def measured(function: Any, x: Tensor, fmt: str) -> tuple[dict[str, NodeError], dict[str, Trace]]:
    """Of every node of a function in a format."""
    found = measurement_of(Function(function), x)
    errors, traces = ({name: by[fmt] for name, by in each.items()} for each in (found.errors, found.traces))
    return errors, traces


@pytest.mark.parametrize(
    ("packet", "move"),
    [
        ("view", lambda x: x.view(2, 1)),
        ("cat", lambda x: torch.cat([x, x])),
        ("flip", lambda x: x.flip(0)),
        ("roll", lambda x: x.roll(1, 0)),
        ("gather", lambda x: x.gather(0, torch.tensor([1, 1]))),
    ],
)
def test_what_moves_entries_is_rounded_and_no_more(packet: str, move: Any) -> None:
    _, traces = measured(lambda x: move(x * 1.0), torch.tensor([1 + 2.0**-9, 3.0]), "bf16")
    assert traces[packet] == Trace("rounding", "none")


def test_alone_on_rounded_inputs_and_in_the_run_that_is_low_from_the_start() -> None:
    # In BF16 x is 1 + 2^-7. Three times that is 3 + 1.5 * 2^-6, rounded to even 3 + 2^-5; of x itself, it is nearest 3 + 2^-6.
    x = torch.tensor([1 + 3 * 2.0**-9])
    errors, _ = measured(lambda x: (x * 3).neg(), x, "bf16")
    exact = 3 * x.item()
    assert errors["mul"].local_error == pytest.approx((3 + 2.0**-5 - exact) / exact)
    assert errors["neg"].local_error == pytest.approx((exact - 3 - 2.0**-6) / exact)
    assert errors["neg"].propagated_error == errors["mul"].propagated_error == errors["mul"].local_error


def test_an_overflow_is_born_once() -> None:
    errors, traces = measured(lambda x: (x * x) - 1, torch.tensor([300.0, 2.0]), "fp16")
    assert (errors["mul"].overflow, errors["mul"].cause, errors["mul"].originates_here) == (1, "overflow", True)
    assert traces["mul"].broken
    assert (errors["sub"].overflow, errors["sub"].originates_here) == (1, False)  # 90000 is beyond FP16 on its way in


def test_a_comparison_that_turns_is_told_by_its_share() -> None:
    x = torch.tensor([1 + 2.0**-12, 1.0])
    errors, traces = measured(lambda x: x * 1 > 1, x, "fp16")
    assert errors["gt"] == NodeError(disagreement=0.5, cause="discrete", originates_here=True)
    assert traces["gt"].broken


def test_where_something_decides_by_a_result_is_told() -> None:
    x = torch.tensor([1.1])
    _, plain = measured(lambda x: (x * 3).exp(), x, "fp16")
    _, near = measured(lambda x: (x * 3) > 1, x, "fp16")
    assert (plain["mul"].near, near["mul"].near) == (False, True)
    assert not near["mul"].broken


def test_what_cannot_run_says_why_and_the_low_run_goes_on_from_fp32() -> None:
    errors, _ = measured(lambda x: torch.linalg.cholesky(x).exp(), torch.diag(torch.tensor([4.0, 9.0])), "fp16")
    refused = errors["linalg_cholesky"]
    assert (refused.cause, refused.originates_here, refused.propagated_error) == ("unsupported", True, 0.0)
    assert "CUDA" in str(refused.unsupported)
    assert errors["exp"].unsupported is None
    assert 0 < errors["exp"].propagated_error < 2**-10
