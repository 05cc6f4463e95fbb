"""The quick backward pass of a 1x1 convolution, against autograd's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.measure.convolution import has_quick_backward, quick
from auditor.ops import products
from tests.gradients import same_gradients
from tests.subjects import normal

conv2d = torch.ops.aten.conv2d.default
pytestmark = pytest.mark.skipif(not products._has_onednn(), reason="torch was built without oneDNN")


def leaves(bias: bool) -> list[Tensor]:
    tensors = [normal(3, 24, 20, 16), normal(40, 24, 1, 1, seed=1), normal(40, seed=2)]
    return [x.requires_grad_() for x in tensors[: 3 if bias else 2]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_gradients(bias: bool, strided: bool) -> None:
    ours, theirs = leaves(bias), leaves(bias)
    result, expected = quick(*ours), conv2d(*theirs)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    weights = normal(*expected.shape, seed=3)
    weights = weights.transpose(2, 3).contiguous().transpose(2, 3) if strided else weights
    same_gradients(ours, theirs, (result, expected), weights)


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias = leaves(True)
    quick(x, weight.detach(), bias).sum().backward()
    assert (x.grad is None, weight.grad, bias.grad is None) == (False, None, False)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ((), True),
        ((None, [1, 1], [0, 0], [1, 1], 1), True),
        ((None, [2, 2]), False),
        ((None, [1, 1], [1, 1]), False),
        ((None, [1, 1], [0, 0], [2, 2]), False),
        ((None, [1, 1], [0, 0], [1, 1], 2), False),
    ],
)
def test_only_where_it_is_the_same(rest: tuple[Any, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, weight = normal(3, 24, 20, 16), normal(40, 24, 1, 1)
    assert has_quick_backward(conv2d, (x, weight, *rest)) is expected
    assert not has_quick_backward(conv2d, (x, normal(40, 24, 3, 3), *rest))
    assert not has_quick_backward(torch.ops.aten.linear.default, (x, weight))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert not has_quick_backward(conv2d, (x, weight, *rest))
