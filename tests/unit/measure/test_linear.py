"""Linear layers with derivatives by oneDNN, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.measure.linear import joined, linear, with_quick_backward
from auditor.ops import products
from tests.gradients import same_gradients
from tests.subjects import normal

_linear, _addmm = torch.ops.aten.linear.default, torch.ops.aten.addmm.default
pytestmark = pytest.mark.skipif(not products._has_onednn(), reason="torch was built without oneDNN")


def leaves(bias: bool, shape: tuple[int, ...] = (3, 40, 192)) -> list[Tensor]:
    tensors = [normal(*shape), normal(160, 192, seed=1), normal(160, seed=2)]
    return [x.requires_grad_() for x in tensors[: 3 if bias else 2]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(120, 192), (3, 40, 192), (2, 3, 20, 192)])
def test_gradients(bias: bool, shape: tuple[int, ...]) -> None:
    ours, theirs = leaves(bias, shape), leaves(bias, shape)
    result, expected = linear(*ours), _linear(*theirs)
    assert torch.equal(result, expected)
    weights = normal(*expected.shape, seed=3)
    same_gradients(ours, theirs, (result, expected), weights)


@pytest.mark.parametrize("contiguous", [True, False])
def test_gradients_of_a_product_that_is_joined_with_its_sum(contiguous: bool) -> None:
    def given() -> list[Tensor]:
        tensors = normal(160, seed=2), normal(120, 192), normal(192, 160, seed=1)
        tensors = tensors if contiguous else tuple(x.t().contiguous().t() for x in tensors)
        return [x.requires_grad_() for x in tensors]

    ours, theirs = given(), given()
    result, expected = joined(*ours), _addmm(*theirs)
    assert torch.equal(result, expected)
    weights = normal(*expected.shape, seed=3)
    same_gradients(ours, theirs, (result, expected), weights)
    weight = ours[2].detach()
    assert [x.stride() for x in torch.autograd.grad(joined(*ours).sum(), ours)][2] == weight.contiguous().stride()


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias = leaves(True)
    linear(x, weight.detach(), bias).sum().backward()
    assert (x.grad is None, weight.grad, bias.grad is None) == (False, None, False)
    x, weight, bias = leaves(True, (120, 192))
    joined(bias.detach(), x, weight.detach().t()).sum().backward()
    assert (x.grad is None, weight.grad, bias.grad) == (False, None, None)


def test_only_large_ones_in_float32() -> None:
    x, weight, bias = leaves(True, (120, 192))
    assert with_quick_backward(_linear, (x, weight, bias), {}) is linear
    assert with_quick_backward(_addmm, (bias, x, weight.t()), {}) is joined
    assert with_quick_backward(_linear, (x[:1], weight), {}) is None
    assert with_quick_backward(_linear, (x.double(), weight.double()), {}) is None
    assert with_quick_backward(_addmm, (bias, x, weight.t()), {"alpha": 2}) is None
    assert with_quick_backward(torch.ops.aten.mm.default, (x, weight.t()), {}) is None


@pytest.mark.parametrize("shape", [(1,), (120, 160), (120, 1)])
def test_a_bias_that_is_broadcast_is_left_to_torch(shape: tuple[int, ...]) -> None:
    x, weight, _ = leaves(True, (120, 192))
    assert with_quick_backward(_addmm, (normal(*shape), x, weight.t()), {}) is None
    if len(shape) == 1:
        assert with_quick_backward(_linear, (x, weight, normal(*shape)), {}) is None
