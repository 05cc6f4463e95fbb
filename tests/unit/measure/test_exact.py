"""A sample of an exact result is a part of the whole, and is all that is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.measure.exact import Exact, sampled
from auditor.ops.kernels import run_op
from tests.subjects import normal

aten = torch.ops.aten


def half(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).half()


def channels(*shape: int) -> tuple[Any, ...]:
    """Arguments of a batch norm with given statistics: input, weight, bias, mean, variance."""
    size = shape[1]
    return half(*shape), half(size, seed=1), half(size, seed=2), half(size, seed=3), half(size, seed=4).abs() + 1


BIG = (4, 24, 40, 50)
SAMPLED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "relu": (aten.relu.default, (half(*BIG),), {}),
    "gelu": (aten.gelu.default, (half(8, 40, 3000),), {"approximate": "tanh"}),
    "add": (aten.add.Tensor, (half(*BIG), half(*BIG, seed=1)), {"alpha": 2}),
    "broadcast": (aten.mul.Tensor, (half(300, 1, 700), half(5, 1, seed=1)), {}),
    "outer": (aten.sub.Tensor, (half(900, 1), half(1, 1000, seed=1)), {}),
    "scalar": (aten.div.Tensor, (half(300_000), torch.tensor(3.0).half()), {}),
    "where": (aten.where.self, (normal(600, 700) > 0, half(600, 700), half(600, 1, seed=1)), {}),
    "batch_norm": (aten.batch_norm.default, (*channels(*BIG), False, 0.1, 1e-5, False), {}),
    "batch_norm_native": (
        aten._native_batch_norm_legit_no_training.default,
        (*(x.float() if i else x for i, x in enumerate(channels(*BIG))), 0.1, 1e-5),
        {},
    ),
    "layer_norm": (aten.layer_norm.default, (half(9, 300, 96), [96], half(96, seed=1), half(96, seed=2)), {}),
    "layer_norm_of_two": (aten.layer_norm.default, (half(700, 20, 12), [20, 12]), {}),
    "softmax": (aten.softmax.int, (half(6, 500, 90), -1), {}),
    "softmax_inside": (aten.softmax.int, (half(6, 500, 90), 1), {}),
    "group_norm": (aten.group_norm.default, (half(16, 8, 40, 20), 4), {}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_is_a_part_of_the_whole(name: str) -> None:
    target, args, kwargs = SAMPLED[name]
    exact = Exact(target, args, kwargs)
    low = run_op(target, args, kwargs)
    pairs = exact.sample(low)
    assert "whole" not in vars(exact)
    first, ours = pairs[0]
    assert 0 < first.numel() <= exact.whole[0].numel() / 2 if isinstance(exact.whole, tuple) else True
    whole = exact.whole[0] if isinstance(exact.whole, tuple) else exact.whole
    theirs = low[0] if isinstance(low, tuple) else low
    steps = tuple(slice(None, None, step) for step in exact.steps or ())
    assert first.shape == whole[steps].shape
    assert first.numel() <= whole.numel() / 2
    assert torch.allclose(first, whole[steps], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours, theirs[steps])


WHOLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sum": (aten.sum.dim_IntList, (half(600, 700), [1])),
    "cumsum": (aten.cumsum.default, (half(600, 700), 1)),
    "statistics of the batch": (
        aten.batch_norm.default,
        (half(*BIG), None, None, torch.zeros(24), torch.ones(24), True, 0.1, 1e-5, False),
    ),
    "no statistics": (aten.batch_norm.default, (half(*BIG), None, None, None, None, True, 0.1, 1e-5, False)),
    "small": (aten.relu.default, (half(60, 70),)),
    "one long row": (aten.softmax.int, (half(1, 300_000), -1)),
    "no tensor": (aten.arange.default, (5,)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_computed_as_a_whole_at_once(name: str) -> None:
    target, args = WHOLE[name]
    exact = Exact(target, args, {})
    assert exact.steps is None
    exact.prepare()
    assert "whole" in vars(exact)


def test_what_an_operation_raises_comes_from_preparing() -> None:
    with pytest.raises(RuntimeError, match="singular"):
        Exact(aten.linalg_inv.default, (torch.zeros(3, 3),), {}).prepare()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (300, 400), (1_000_003,)])
def test_a_sample_of_a_tensor_is_spread_over_it(shape: tuple[int, ...]) -> None:
    x = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float64)[: torch.Size(shape).numel()].reshape(shape)
    found = sampled(x)
    assert found.numel() == min(x.numel(), found.numel()) <= 1 << 14
    assert len(found.unique()) == found.numel()
    if x.numel() > 1 << 15:
        assert float(found.min()) < 0.01 * x.numel()
        assert float(found.max()) > 0.98 * x.numel()
    else:
        assert found.numel() == x.numel() or x.numel() > 1 << 14
