"""A plan that is applied for a while leaves nothing behind: the same objects, the same storage, the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.artefact import applying as runtime
from auditor.artefact.applying import apply_plan, is_wrapped
from auditor.isolation import isolated
from tests.support.patching import PLANS, identity, plan, scope, shared, versions
from tests.support.patching import Net as Plain
from tests.support.subjects import normal, seeded


@contextmanager
def patched(model: nn.Module, plan: dict[str, Any]) -> Iterator[nn.Module]:
    with isolated(model):
        yield apply_plan(model, plan)


both = pytest.mark.parametrize("name", PLANS)


@both
def test_the_body_sees_what_apply_makes_and_nothing_stays(name: str) -> None:
    model, x = shared(), normal(2, 4, seed=3)
    expected = apply_plan(copy.deepcopy(model), PLANS[name])(x)
    before, written = identity(model), versions(model)
    with patched(model, PLANS[name]) as inside:
        assert inside is model
        assert is_wrapped(model)
        assert torch.equal(model(x), expected)
        assert model.first.weight is model.twin.weight
        assert (model.first.weight.dtype is torch.bfloat16) is (name == "cast")
    assert identity(model) == before
    assert versions(model) == written


@both
def test_bodies_that_raise(name: str) -> None:
    model = shared()
    before = identity(model)
    with pytest.raises(RuntimeError, match="inside"), patched(model, PLANS[name]):
        raise RuntimeError("inside")
    assert identity(model) == before


def test_plans_that_do_not_fit() -> None:
    model = shared()
    before = identity(model)
    with pytest.raises(ValueError, match="nowhere"), patched(model, plan("cast", {"nowhere": scope("bf16")})):
        raise AssertionError("there is no body without a patched model")
    assert identity(model) == before


@pytest.mark.parametrize("calls", [1, 4, 12])
def test_plans_that_break_half_way(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, left = shared(), iter(range(calls))
    before, convert = identity(model), runtime.convert

    def breaking(tree: Any, dtype: torch.dtype) -> Any:
        if next(left, None) is None:
            raise RuntimeError("out of memory")
        return convert(tree, dtype)

    monkeypatch.setattr(runtime, "convert", breaking)
    with pytest.raises(RuntimeError, match="out of memory"), patched(model, PLANS["cast"]):
        pass
    assert identity(model) == before


@both
def test_a_plan_that_was_applied_before_is_back(name: str) -> None:
    model, x = apply_plan(shared(), PLANS["autocast"]), normal(2, 4, seed=3)
    expected, before = model(x), identity(model)
    with patched(model, PLANS[name]):
        model(normal(2, 4))
    assert identity(model) == before
    assert torch.equal(model(x), expected)


@both
def test_gradients_that_are_on_their_way_arrive(name: str) -> None:
    model, twin, x = seeded(Plain), seeded(Plain), normal(2, 4)
    fired: list[Tensor] = []
    model.first.weight.register_post_accumulate_grad_hook(fired.append)
    loss = model(x).square().sum()
    with patched(model, PLANS[name]):
        model(x)
    loss.backward()
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model(x).sum().backward()
    assert len(fired) == 2


class Alone(nn.Module):
    """A model of which there is one: copies of it are the model itself, as of some that hold sockets or locks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self

    def forward(self, x: Tensor) -> Tensor:
        scores = self.norm(self.first(x)).clamp(min=torch.finfo(x.dtype).tiny)
        return self.last(scores)


class Locked(Alone):
    """One that refuses to be copied, as a lock inside a model does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        raise TypeError("cannot pickle '_thread.lock' object")


@pytest.mark.parametrize("model_class", [Alone, Locked])
def test_models_that_cannot_be_copied_are_audited_and_come_back(model_class: type[nn.Module]) -> None:
    model, x = seeded(model_class), normal(6, 16)
    before = identity(model)
    audit = auditor.audit(model, x, device="cpu", max_error=0.05)
    assert identity(model) == before
    low = {name: plan for name, plan in audit.plans.items() if plan.low_precision_flops}
    assert all(plan.verified for plan in low.values())
    assert {"autocast_bf16", "cast_bf16"} <= low.keys()
    assert all(1e-5 < (plan.measured_error or 0) < 0.05 for plan in low.values())
