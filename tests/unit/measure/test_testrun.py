"""What one operation alone adds in a format: nothing, one rounding, or more, and what is kept of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.measure.testrun import Trace, turned
from auditor.records import NodeError
from tests.capturing import Function
from tests.subjects import measurement_of, only


def trace(function: object, *inputs: Tensor, packet: str, fmt: str = "bf16") -> Trace:
    measured = measurement_of(Function(function), *inputs)  # type: ignore[arg-type]
    return measured.traces[only(measured.capture, packet).name][fmt]


def values(leaves: list[Tensor] | None) -> list[float]:
    assert leaves is not None
    (leaf,) = leaves
    return [float(x) for x in leaf.reshape(-1)]


U = 2.0**-7
"""Spacing of BF16 above 1."""


def test_a_view_adds_nothing_and_carries_the_rounding_of_what_it_views() -> None:
    found = trace(lambda x: (x * 1.0).view(2, 1), torch.tensor([1.0, 1 + U / 4]), packet="view")
    assert (found.isolated, found.own) == (None, [])


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
    assert (found.isolated, found.own) == (None, [])


def test_an_operation_that_rounds_its_result_once() -> None:
    # 1.5 (1 + U) = 1.5 + 1.5 U lies between 1.5 + U and 1.5 + 2 U, a tie that goes to the even 1.5 + 2 U: off by U / 2
    found = trace(lambda x: x * 1.5, torch.tensor([1 + U]), packet="mul")
    assert found.own is None  # a rounding of the result, which is computed where it is needed
    assert values(found.isolated) == [U / 2]


def test_an_exact_operation_on_rounded_inputs() -> None:
    # x = 1 + U / 4 is rounded to 1, and twice that is exact: all of the error comes in from outside
    found = trace(lambda x: x + x, torch.tensor([1 + U / 4]), packet="add")
    assert found.own == []
    # 2 + U / 2 rounds to 2 as well: rounding the result is all that happens
    assert found.isolated is None
    # 1 + 0.75 U goes to 1 + U: of the difference 0.75 U is right and U is left, which BF16 holds
    shifted = trace(lambda x: x - 1.0, torch.tensor([1 + 0.75 * U]), packet="sub")
    assert shifted.own == []
    assert values(shifted.isolated) == [0.25 * U]


def test_entries_that_leave_the_range_count_as_no_error_and_are_kept() -> None:
    found = trace(lambda x: x * x, torch.tensor([300.0, 2.0]), packet="mul", fmt="fp16")
    assert values(found.isolated) == [0.0, 0.0]  # no inner product is taken with infinity
    assert found.broken
    assert found.low.tolist() == [float("inf"), 4.0]


def test_what_cannot_run_has_nothing_to_attribute() -> None:
    found = trace(lambda x: torch.linalg.cholesky(x), torch.eye(2), packet="linalg_cholesky", fmt="fp16")
    assert (found.isolated, found.own, found.low) == ([], [], None)


def test_what_decides_is_told() -> None:
    assert trace(lambda x: (x * 3.0).argmax(-1), torch.tensor([[1.0, 2.0]]), packet="mul").near
    assert not trace(lambda x: (x * 3.0).exp(), torch.tensor([[1.0, 2.0]]), packet="mul").near


@pytest.mark.parametrize(
    ("error", "expected"),
    [(NodeError(overflow=1), True), (NodeError(nan=2), True), (NodeError(underflow=1.0, local_error=1.0), False)],
)
def test_what_counts_as_turned_non_finite(error: NodeError, expected: bool) -> None:
    assert turned(error) is expected
