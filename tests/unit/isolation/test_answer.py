"""Runs of the user's own model leave it as it was, whatever they convert."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.isolation.answer import answer, stored_in
from tests.support.capturing import Function
from tests.support.subjects import normal, seeded


class Kept(torch.autograd.Function):
    """A product that notes what autograd has saved of it while the model runs on."""

    saved: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def taken_inside(x: Tensor) -> Tensor:
    x = x.requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(Kept.apply(x).sum(), x)[0]


def swallowed(x: Tensor) -> Tensor:
    try:
        return taken_inside(x)
    except RuntimeError:
        return torch.zeros_like(x)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd": taken_inside,
    "caught by the model": swallowed,
    "torch.func": torch.func.grad(lambda x: (x * x).sum()),
    "jacobian": lambda x: torch.func.jacrev(lambda y: y * y)(x).sum(1),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_model_that_takes_gradients_of_its_own_finds_what_it_saved(name: str) -> None:
    found = answer(Function(GRADIENTS[name]), ((torch.tensor([1.0, 3.0]),), {}), gradients=True)
    assert found[0].tolist() == [2.0, 6.0]


def test_an_answer_with_gradients_keeps_nothing_for_a_backward_pass() -> None:
    """Each product's result is freed as soon as the next is there, but the one that was asked for."""
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = Kept.apply(x)
                seen.append(weakref.ref(x))
                alive.append(sum(other() is not None for other in seen))
            return x

    weight = torch.ones(3, requires_grad=True)
    answer(Chain(), ((weight,), {}), gradients=True)
    assert max(alive) <= 2


def test_a_model_stored_low_comes_back_with_its_gradients() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model(normal(4, 3)).sum().backward()
    tensors = [x for p in model.parameters() for x in (p.data, p.grad)] + list(model.buffers())
    before = [x.clone() for x in tensors]
    with stored_in(model, torch.float16):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
    after = [x for p in model.parameters() for x in (p.data, p.grad)] + list(model.buffers())
    assert [x.data_ptr() for x in after] == [x.data_ptr() for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
