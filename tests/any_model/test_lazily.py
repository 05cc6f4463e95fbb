"""Models that compute later or elsewhere: generators as results, memories that hold weakly, threads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from tests.any_model.holding import held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal

X = normal(4, 8)


def steps(m: Any, x: Tensor) -> Iterator[Tensor]:
    for _ in range(3):
        x = m.layer(x).tanh()
        yield x


def mapped(m: Any, x: Tensor) -> Iterator[Tensor]:
    return map(m.layer, [x, -x])


@pytest.mark.parametrize("function", [steps, mapped])
def test_what_is_computed_while_it_is_read_is_computed_under_autocast(function: Any) -> None:
    audit = held(lambda: (Model(function, layer=linear(8, 8)), ((X,), {})))
    plan = audit.plans["autocast_bf16"]
    assert plan.verified
    assert plan.low_precision_flops == 1
    assert plan.measured_error is not None
    assert plan.measured_error > 1e-4  # BF16 keeps 8 bits: nothing low would be 0


class Key:
    """Can be referred to weakly."""


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.key = linear(8, 8), Key()
        self.norms: weakref.WeakKeyDictionary[Key, Tensor] = weakref.WeakKeyDictionary()

    def forward(self, x: Tensor) -> Any:
        if self.key not in self.norms:
            self.norms[self.key] = self.layer.weight.detach().norm()
        return self.layer(x) / self.norms[self.key]


def test_a_memory_that_holds_weakly() -> None:
    held(lambda: (Remembers(), ((X,), {})))


class WritesAView(nn.Module):
    """A module of which others hold weak references writes into a view of one of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, whole = linear(8, 8), torch.ones(2, 8)
        self.register_buffer("part", whole[0])
        self.register_buffer("whole", whole)
        self.seen: Any = weakref.ref(self.part)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        self.part.mul_(y.mean(0))
        return y * self.whole[0] + self.whole[1]


def test_a_view_written_with_gradients_is_a_buffer_again() -> None:
    model = WritesAView()
    auditor.audit(model, X)
    assert model.part.is_leaf
    assert not model.part.requires_grad
    assert model.seen() is model.part


def test_modules_that_run_in_other_threads_are_said_to_be_left_out() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(m.second, x)
            return m.first(x) + beside.result()

    audit = held(lambda: (Model(forward, first=linear(8, 8), second=linear(8, 8, seed=1)), ((X,), {})))
    assert any("threads of its own" in warning for warning in audit.warnings)
    assert {report.node.owner for report in audit.nodes} == {"", "first"}
