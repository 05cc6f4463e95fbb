"""Convolutions with quick backward passes, against autograd's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.measure.convolution import depthwise, quick, with_quick_backward
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
    assert torch.equal(result, expected)
    weights = normal(*expected.shape, seed=3)
    weights = weights.transpose(2, 3).contiguous().transpose(2, 3) if strided else weights
    same_gradients(ours, theirs, (result, expected), weights)


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias = leaves(True)
    quick(x, weight.detach(), bias).sum().backward()
    assert (x.grad is None, weight.grad, bias.grad is None) == (False, None, False)


@pytest.mark.parametrize("stride", [(2, 2), (3, 1)])
def test_gradients_where_filters_leave_entries_out(stride: tuple[int, int]) -> None:
    ours, theirs = leaves(True), leaves(True)
    result, expected = quick(*ours, stride=stride), conv2d(*theirs, list(stride))
    assert torch.equal(result, expected)
    same_gradients(ours, theirs, (result, expected), normal(*expected.shape, seed=3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "padding"), [((7, 5), [3, 2]), ((5, 5), [0, 0]), ((11, 5), [5, 2])])
def test_gradients_of_a_filter_for_each_channel(bias: bool, size: tuple[int, int], padding: list[int]) -> None:
    def given() -> list[Tensor]:
        tensors = [normal(3, 24, 12, 10), normal(24, 1, *size, seed=1), normal(24, seed=2)]
        return [x.requires_grad_() for x in tensors[: 3 if bias else 2]]

    ours, theirs = given(), given()
    rest = [1, 1], padding, [1, 1], 24
    result = depthwise(*ours, *([] if bias else [None]), *rest)
    expected = conv2d(*theirs, *([] if bias else [None]), *rest)
    assert torch.equal(result, expected)
    same_gradients(ours, theirs, (result, expected), normal(*expected.shape, seed=3))
    assert all(x.grad is None or x.grad.is_contiguous() for x in ours)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ((), True),
        ((None, [1, 1], [0, 0], [1, 1], 1), True),
        ((None, [2, 2]), True),
        ((None, [2]), False),
        ((None, [1, 1], [1, 1]), False),
        ((None, [1, 1], [0, 0], [2, 2]), False),
        ((None, [1, 1], [0, 0], [1, 1], 2), False),
    ],
)
def test_only_where_it_is_the_same(rest: tuple[Any, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, weight = normal(3, 24, 20, 16), normal(40, 24, 1, 1)
    found = with_quick_backward(conv2d, (x, weight, *rest))
    assert (found is not None) is expected
    if found is not None:
        assert torch.equal(found(x, weight, *rest), conv2d(x, weight, *rest))
    assert with_quick_backward(conv2d, (x, normal(40, 24, 3, 3), *rest)) is None
    assert with_quick_backward(torch.ops.aten.linear.default, (x, weight)) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert with_quick_backward(conv2d, (x, weight, *rest)) is None


@pytest.mark.parametrize("stride", [[1, 1], [2, 2]])
@pytest.mark.parametrize("shape", [(2, 64, 1, 300), (2, 64, 32, 32), (4, 4096, 1, 1)])
@pytest.mark.parametrize("last", [True, False])
def test_results_are_laid_out_as_torch_does(
    shape: tuple[int, ...], stride: list[int], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A view that follows in the graph was taken of that layout; the strides of a dimension of one entry say nothing.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x = normal(*shape).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    args = x, normal(32, shape[1], 1, 1), None, stride
    found, expected = with_quick_backward(conv2d, args), conv2d(*args)
    results = [expected] if found is None else [expected, found(*args)]
    told = [[step for step, size in zip(y.stride(), y.shape, strict=True) if size > 1] for y in results]
    assert told[0] == told[-1]
    assert found is not None or (last and stride == [2, 2])


@pytest.mark.parametrize(
    ("image", "size", "stride", "groups", "expected"),
    [
        ((20, 16), (5, 5), [1, 1], 24, True),
        ((20, 16), (3, 5), [1, 1], 24, False),
        ((7, 16), (7, 7), [1, 1], 24, True),
        ((20, 16), (5, 5), [2, 2], 24, False),
        ((20, 16), (5, 5), [1, 1], 12, False),
    ],
)
def test_which_filters_are_one_for_each_channel(
    image: tuple[int, int],
    size: tuple[int, int],
    stride: list[int],
    groups: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    args = normal(3, 24, *image), normal(24, 24 // groups, *size), None, stride, [2, 2], [1, 1], groups
    found = with_quick_backward(conv2d, args)
    assert (found is depthwise) is expected
    assert found is None or torch.equal(found(*args), conv2d(*args))


def test_convolutions_in_other_formats_are_left_to_torch() -> None:
    x, weight, bias = (x.detach() for x in leaves(True))
    assert with_quick_backward(conv2d, (x, weight, bias)) is not None or torch.get_num_threads() > 1
    for dtype in (torch.float64, torch.float16):
        assert with_quick_backward(conv2d, (x.to(dtype), weight.to(dtype), None)) is None
