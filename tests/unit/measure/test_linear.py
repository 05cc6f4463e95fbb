"""Linear layers by oneDNN and their derivatives, against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.measure.linear import is_quick, linear
from auditor.ops import products
from tests.gradients import same_gradients
from tests.subjects import normal

_linear = torch.ops.aten.linear.default
pytestmark = pytest.mark.skipif(not products._has_onednn(), reason="torch was built without oneDNN")


def leaves(bias: bool, shape: tuple[int, ...] = (3, 40, 192)) -> list[Tensor]:
    tensors = [normal(*shape), normal(160, 192, seed=1), normal(160, seed=2)]
    return [x.requires_grad_() for x in tensors[: 3 if bias else 2]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(120, 192), (3, 40, 192), (2, 3, 20, 192)])
def test_gradients(bias: bool, shape: tuple[int, ...]) -> None:
    ours, theirs = leaves(bias, shape), leaves(bias, shape)
    result, expected = linear(*ours), _linear(*theirs)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
    weights = normal(*expected.shape, seed=3)
    same_gradients(ours, theirs, (result, expected), weights)


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias = leaves(True)
    linear(x, weight.detach(), bias).sum().backward()
    assert (x.grad is None, weight.grad, bias.grad is None) == (False, None, False)


def test_only_large_ones_in_float32() -> None:
    x, weight, bias = leaves(True)
    assert is_quick(_linear, (x, weight, bias), {})
    assert not is_quick(torch.ops.aten.addmm.default, (bias, x, weight), {})
    assert not is_quick(_linear, (x[:, :1], weight), {})
    assert not is_quick(_linear, (x.double(), weight.double()), {})
