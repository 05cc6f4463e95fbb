"""What operations cost: views nothing, and a reshape that no strides can express as much as the copy it makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from auditor.plan.costs import costs_of, seconds
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal, only


@pytest.mark.parametrize(
    ("function", "packet", "free"),
    [
        (lambda x: x.exp().reshape(-1), "reshape", True),
        (lambda x: x.exp().t().reshape(-1), "reshape", False),
        (lambda x: x.exp().flatten(), "flatten", True),
        (lambda x: x.exp().t().flatten(), "flatten", False),
        (lambda x: x.exp().t(), "t", True),
        (lambda x: x.exp().movedim(0, 1), "movedim", True),
        (lambda x: nn.functional.dropout(x.exp(), 0.5, training=True), "dropout", False),
    ],
)
def test_a_reshape_is_free_unless_it_has_to_copy(function: Callable[[Tensor], Tensor], packet: str, free: bool) -> None:
    capture = capture_of(Function(function), normal(4, 6))
    cost = costs_of(capture)[only(capture, packet).name]
    assert cost.free is free
    assert (seconds(cost, "fp32") == 0) is free
    assert cost.elements == 2 * 24  # read and written
