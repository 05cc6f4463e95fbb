"""What functorch, autograd and higher-order operators compute inside a forward is on the recording, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.replaying import Model, kinds, linear, operations, replayed
from tests.support.subjects import normal

X = normal(3, 4)


def energy(self: Any, row: Tensor) -> Tensor:
    return torch.tanh(self.layer(row)).sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda self, x: torch.vmap(lambda row: torch.softmax(self.layer(row), -1))(x),
    "vmap in vmap": lambda self, x: torch.vmap(torch.vmap(lambda a: a * a.exp()))(x) + x,
    "vmap over chunks": lambda self, x: torch.vmap(self.layer, chunk_size=2)(x),
    "grad": lambda self, x: torch.func.grad(lambda row: energy(self, row))(x[0]),
    "grad of vmap": lambda self, x: torch.func.grad(lambda y: torch.vmap(lambda r: energy(self, r))(y).sum())(x),
    "vmap of grad": lambda self, x: torch.vmap(torch.func.grad(lambda row: energy(self, row)))(x),
    "jacrev": lambda self, x: torch.func.jacrev(lambda row: torch.tanh(self.layer(row)))(x[0]),
    "jacfwd": lambda self, x: torch.func.jacfwd(lambda row: torch.tanh(self.layer(row)))(x[0]),
    "hessian": lambda self, x: torch.func.hessian(lambda row: energy(self, row))(x[0]),
    "jvp": lambda self, x: torch.func.jvp(lambda y: torch.tanh(self.layer(y)), (x,), (x * 2,)),
    "vjp": lambda self, x: torch.func.vjp(lambda y: torch.tanh(self.layer(y)), x)[1](x),
    "functional_call": lambda self, x: torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    found = replayed(Model(TRANSFORMS[name], layer=linear(4, 4)), X)
    assert "input" in kinds(found)
    assert ("parameter" in kinds(found)) == (name != "vmap in vmap")
    assert all(
        node.source is None or node.source.startswith("test_transforms_recorded.py:") for node in found.nodes.values()
    )


def forces(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        total = torch.tanh(self.layer(x)).sum()
        return total, torch.autograd.grad(total, x, create_graph=True)[0]


def forces_of_a_caller_with_gradients(self: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    return torch.autograd.grad(torch.tanh(self.layer(x)).sum(), x)[0]


@pytest.mark.parametrize("forward", [forces, forces_of_a_caller_with_gradients])
def test_gradients_taken_in_forward(forward: Callable[..., Any]) -> None:
    found = replayed(Model(forward, layer=linear(4, 4)), X)
    assert "tanh_backward" in operations(found)
    assert kinds(found) == ["input", "parameter", "parameter"]  # nothing that autograd kept is a constant


def test_backward_in_forward() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        (self.layer(x) ** 2).sum().backward()
        assert x.grad is not None
        return x - 0.1 * x.grad

    model = Model(forward, layer=linear(4, 4).requires_grad_(False))
    assert "sub" in operations(replayed(model, X))


Q = normal(1, 2, 16, 8)


def test_flex_attention_with_a_score_of_its_own() -> None:
    def forward(self: Any, q: Tensor) -> Tensor:
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + self.bias[h] * (i - j))

    found = replayed(Model(forward, bias=normal(2, seed=1)), Q)
    assert {"matmul", "_safe_softmax"} <= set(operations(found))
    assert "buffer" in kinds(found)


def test_flex_attention_with_a_block_mask_made_in_forward() -> None:
    def forward(self: Any, q: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, q, q, block_mask=mask)

    assert "_safe_softmax" in operations(replayed(Model(forward), Q))


def test_what_is_compiled_runs_as_it_is_written() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Sequential(linear(4, 4), nn.GELU()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).exp()

    model = Compiled()
    with torch.compiler.set_stance("force_eager"):
        found = replayed(model, X)
    assert operations(found) == ["linear", "gelu", "exp"]
