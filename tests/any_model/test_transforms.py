"""Transforms and derivatives in forward: torch.func, forward mode, forces, checkpoints, functions with a backward of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.any_model.holding import held
from tests.replaying import Model, linear
from tests.subjects import normal

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


def weights_by_sample(m: Any, x: Tensor) -> Tensor:
    weights = m.first(x)[:, :, None] * m.second.weight[None]
    return vmap(lambda w, row: functional_call(m.second, {"weight": w, "bias": m.second.bias}, (row,)))(weights, x)


def inner_step(m: Any, x: Tensor) -> Tensor:
    weights = dict(m.first.named_parameters())
    slopes = grad(lambda w: functional_call(m.first, w, (x,)).square().mean())(weights)
    return functional_call(m.first, {name: w - 0.1 * slopes[name] for name, w in weights.items()}, (x,))


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


def batched_gradients(m: Any, x: Tensor) -> Tensor:
    """The gradients of every entry at once, by the vmap that is older than functorch."""
    x = x.requires_grad_()
    y = m.first(x).tanh()
    rows = torch.eye(8)[:, None].expand(8, 4, 8)
    result: Tensor = m.second(torch.autograd.grad(y, x, rows, is_grads_batched=True)[0])
    return result


def vectorised_jacobian(m: Any, x: Tensor) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(lambda z: m.first(z).tanh().sum(0), x, vectorize=True)
    result: Tensor = m.second(jacobian)
    return result


def learns_in_forward(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        weight = m.second.weight.detach().clone().requires_grad_()
        for _ in range(2):
            loss = F.mse_loss(F.linear(m.first(x), weight), x)
            weight = (weight - 0.1 * torch.autograd.grad(loss, weight)[0]).detach().requires_grad_()
    return F.linear(x, weight)


def checkpointed_forces(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = checkpoints.checkpoint(lambda y: energy(m, y), x, use_reentrant=False)
        return torch.autograd.grad(value, x)[0]


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


class Marking(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.relu(), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Any) -> Tensor:
        return slope * ctx.saved_tensors[0]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.relu_()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


def marked(m: Any, x: Tensor) -> Tensor:
    value, kept = Marking.apply(m.first(x))
    return m.second(value * kept)


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda m, x: vmap(lambda row: m.second(m.first(row).softmax(-1)))(x),
    "cond by row": lambda m, x: vmap(lambda r: torch.cond(r.sum() > 0, m.second, torch.tanh, (r,)))(m.first(x)),
    "grad": lambda m, x: m.second(grad(lambda y: energy(m, y))(x)),
    "jacrev": lambda m, x: vmap(jacrev(lambda row: torch.tanh(m.first(row))))(x),
    "jacfwd": lambda m, x: vmap(jacfwd(lambda row: torch.tanh(m.first(row))))(x),
    "hessian": lambda m, x: vmap(hessian(lambda row: energy(m, row)))(x),
    "jvp": lambda m, x: jvp(lambda y: torch.tanh(m.first(y)), (x,), (torch.ones_like(x),)),
    "gradients by sample": gradients_by_sample,
    "weights by sample": weights_by_sample,
    "ensemble": ensemble,
    "inner step": inner_step,
    "forward mode": dual,
    "forces": forces,
    "curvature": curvature,
    "batched gradients": batched_gradients,
    "vectorised jacobian": vectorised_jacobian,
    "learns in forward": learns_in_forward,
    "reentrant checkpoint": checkpointed(True),
    "checkpoint": checkpointed(False),
    "checkpoint with forces": checkpointed_forces,
    "function that saves": lambda m, x: m.second(Saving.apply(m.first(x), m.second.weight)),
    "function that marks": marked,
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
    "plain": attended,
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
