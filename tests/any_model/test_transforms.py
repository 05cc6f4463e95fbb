"""Transforms and derivatives in forward: torch.func, forward mode, forces, checkpoints, functions with a backward of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.any_model.holding import held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

X = normal(4, 8)


def energy(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)).sum()


def gradients_by_sample(m: Any, x: Tensor) -> Any:
    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(m.first, weights, (row,)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(dict(m.first.named_parameters()), x)


def ensemble(m: Any, x: Tensor) -> Tensor:
    weights, buffers = stack_module_state([m.first, m.second])
    return vmap(lambda w, b: functional_call(m.first, (w, b), (x,)))(weights, buffers)


def dual(m: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        out = m.second(torch.tanh(m.first(forward_ad.make_dual(x, torch.ones_like(x)))))
        return tuple(forward_ad.unpack_dual(out))


def forces(m: Any, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    value = energy(m, x)
    return value, -torch.autograd.grad(value, x)[0]


def curvature(m: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = energy(m, x)
        slope = torch.autograd.grad(value, x, create_graph=True)[0]
        return value, slope, torch.autograd.grad(slope.sum(), x)[0]


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Any]:
    return lambda m, x: checkpoints.checkpoint(lambda y: m.second(m.first(y).relu()), x, use_reentrant=reentrant)


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope @ weight.t(), x.t() @ slope


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.relu_()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda m, x: vmap(lambda row: m.second(m.first(row).softmax(-1)))(x),
    "grad": lambda m, x: m.second(grad(lambda y: energy(m, y))(x)),
    "jacrev": lambda m, x: vmap(jacrev(lambda row: torch.tanh(m.first(row))))(x),
    "hessian": lambda m, x: vmap(hessian(lambda row: energy(m, row)))(x),
    "jvp": lambda m, x: jvp(lambda y: torch.tanh(m.first(y)), (x,), (torch.ones_like(x),)),
    "gradients by sample": gradients_by_sample,
    "ensemble": ensemble,
    "forward mode": dual,
    "forces": forces,
    "curvature": curvature,
    "reentrant checkpoint": checkpointed(True),
    "checkpoint": checkpointed(False),
    "function that saves": lambda m, x: m.second(Saving.apply(m.first(x), m.second.weight)),
    "function in place": lambda m, x: m.second(InPlace.apply(m.first(x))),
}


@pytest.mark.parametrize("name", CASES)
def test_transforms_and_derivatives(name: str) -> None:
    def build() -> Any:
        return Model(CASES[name], first=linear(8, 8), second=linear(8, 8, seed=1)).eval(), ((X.clone(),), {})

    audit = held(build, formats=("fp16",))
    assert sum((report.flops or 0) > 0 for report in audit.nodes) > 0


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def attended(m: Any, x: Tensor, **options: Any) -> Tensor:
    result: Tensor = flex_attention(*m.first(x).chunk(3, -1), **options)
    return result


ATTENTION: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "block mask": lambda m, x: attended(m, x, block_mask=create_block_mask(causal, None, None, 16, 16, device="cpu")),
    "score_mod": lambda m, x: attended(m, x, score_mod=lambda score, b, h, q, k: score + (q - k) * 0.01),
    "learnt bias": lambda m, x: attended(m, x, score_mod=lambda score, b, h, q, k: score + m.bias[(q - k).abs()]),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_flex_attention(name: str) -> None:
    def build() -> Any:
        bias = nn.Parameter(normal(16, seed=3) / 8)
        return Model(ATTENTION[name], first=linear(16, 48), bias=bias).eval(), ((normal(1, 2, 16, 16),), {})

    held(build, formats=("bf16",))
