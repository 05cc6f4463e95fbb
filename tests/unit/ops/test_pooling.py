"""Max pooling in another layout: bit for bit what torch gives, laid out alike, and left alone where it would not pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.ops.kernels import run_op
from auditor.ops.pooling import quickest_pooling
from auditor.ops.products import fastest
from tests.subjects import normal

MAX_POOL = torch.ops.aten.max_pool2d.default
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def awkward(dtype: torch.dtype) -> Tensor:
    """Ties, zeros of both signs, and infinities; NaN, which is no number, in one channel."""
    x = normal(2, 17, 9, 8).mul(2).round().div(2)
    x[0, 3] = torch.zeros(9, 8).copysign(normal(9, 8, seed=1))
    x[1, 4, :3], x[1, 4, 3:6] = -torch.inf, torch.inf
    x[1, 5, 2, 2] = torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("rest", [([2, 2],), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 2], [1, 0], [2, 1], True)])
def test_the_same_bits_in_the_same_layout(dtype: torch.dtype, rest: tuple[Any, ...]) -> None:
    x = awkward(dtype)
    expected = MAX_POOL(x, *rest)
    for compute in (quickest_pooling(MAX_POOL, (x, *rest)), fastest(MAX_POOL, (x, *rest), {})):
        found = compute(x, *rest)
        assert compute is not MAX_POOL
        assert (found.dtype, found.shape, found.stride()) == (dtype, expected.shape, expected.stride())
        number = ~torch.isnan(expected)
        assert torch.equal(torch.isnan(found), ~number)
        assert torch.equal(found[number].view(BITS[dtype]), expected[number].view(BITS[dtype]))
    assert torch.equal(run_op(MAX_POOL, (x, *rest), {}).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize(
    "x",
    [
        normal(2, 15, 8, 8),  # few channels
        normal(17, 8, 8),  # no batch
        normal(2, 17, 8, 8).to(memory_format=torch.channels_last),  # laid out so already, as its result is
        normal(2, 17, 8, 16)[..., ::2],
        normal(2, 17, 8, 8).requires_grad_(),
    ],
)
def test_others_are_left_to_torch(x: Tensor) -> None:
    assert quickest_pooling(MAX_POOL, (x, [2, 2])) is MAX_POOL
    assert run_op(MAX_POOL, (x, [2, 2]), {}).stride() == MAX_POOL(x, [2, 2]).stride()


def test_parts_of_their_own_and_no_entries_at_all() -> None:
    nested = torch.nested.nested_tensor([normal(17, 8, 8), normal(17, 6, 8)])
    assert quickest_pooling(MAX_POOL, (nested, [2, 2])) is MAX_POOL
    assert run_op(MAX_POOL, (normal(0, 17, 8, 8), [2, 2]), {}).shape == (0, 17, 4, 4)


def test_other_operations_are_left_alone() -> None:
    average = torch.ops.aten.avg_pool2d.default
    assert quickest_pooling(average, (normal(2, 17, 8, 8), [2, 2])) is average
