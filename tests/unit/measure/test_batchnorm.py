"""The derivative by running statistics, against autograd through the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.measure.reference import batch_norm
from tests.support.subjects import normal

EPS = 1e-3
REST = {
    "_native_batch_norm_legit_no_training": (0.1, EPS),
    "_native_batch_norm_legit_functional": (False, 0.1, EPS),
    "batch_norm": (False, 0.1, EPS, False),
    "instance_norm": (False, 0.1, EPS, False),
}
"""{operation: what follows the statistics, where they are the given ones}."""


def formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    scaled = (x - mean.view(shape)) / torch.sqrt(variance.view(shape) + EPS)
    scaled = scaled if weight is None else scaled * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("packet", REST)
def test_gradients(shape: tuple[int, ...], affine: bool, packet: str) -> None:
    def leaves() -> list[Tensor | None]:
        tensors = [normal(*shape), normal(3, seed=1), normal(3, seed=2), normal(3, seed=3), normal(3, seed=4).exp()]
        kept = [x if affine or index not in (1, 2) else None for index, x in enumerate(tensors)]
        return [None if x is None else x.double().requires_grad_() for x in kept]

    target = getattr(torch.ops.aten, packet).default
    rest = REST[packet]
    ours, theirs = leaves(), leaves()
    result = batch_norm(target, *ours, *rest)
    result = result[0] if isinstance(result, tuple) else result
    expected = formula(*theirs)  # type: ignore[arg-type]
    torch.testing.assert_close(result, expected)
    weights = normal(*shape, seed=5).double()
    result.backward(weights)
    expected.backward(weights)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
def test_each_gradient_alone(wanted: int) -> None:
    given = [normal(2, 3, 4, 5), normal(3, seed=1), normal(3, seed=2), normal(3, seed=3), normal(3, seed=4).exp()]
    found = []
    for how in (lambda *read: batch_norm(torch.ops.aten.batch_norm.default, *read, *REST["batch_norm"]), formula):
        read = [x.double().requires_grad_(index == wanted) for index, x in enumerate(given)]
        (how(*read) * normal(2, 3, 4, 5, seed=6)).sum().backward()
        assert [x.grad is not None for x in read] == [index == wanted for index in range(5)]
        found.append(read[wanted].grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("packet", ["_native_batch_norm_legit_functional", "batch_norm"])
def test_a_norm_by_its_batch_leaves_running_statistics_alone(packet: str) -> None:
    x, mean, variance = (tensor.requires_grad_() for tensor in (normal(6, 3) + 5, torch.zeros(3), torch.ones(3)))
    target, rest = getattr(torch.ops.aten, packet).default, REST[packet]
    result = batch_norm(target, x, None, None, mean, variance, True, *rest[1:])
    result = result[0] if isinstance(result, tuple) else result
    assert float(result.detach().mean()) == pytest.approx(0, abs=1e-6)
    result.square().sum().backward()
    assert x.grad is not None
    assert (mean.tolist(), variance.tolist(), mean.grad) == ([0.0] * 3, [1.0] * 3, None)
