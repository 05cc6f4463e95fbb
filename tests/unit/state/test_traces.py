"""Whether a run left traces on its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.state.traces import traces
from tests.replaying import Model, linear
from tests.subjects import normal

X = normal(2, 4)


def counts(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x


def fills(m: Any, x: Tensor) -> Tensor:
    m.table["x"] = x
    return x


def adds_up(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1)
    return x


def writes_past_autograd(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.data.mul_(2)
    return x


def moves(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.data = m.layer.weight.data * 2
    return x


def trains(m: Any, x: Tensor) -> Tensor:
    m.layer(x).sum().backward()
    return x


def model(function: Callable[..., Any]) -> nn.Module:
    return Model(function, layer=linear(4, 4), seen=torch.zeros(()), table={}, calls=0)


@pytest.mark.parametrize("function", [counts, fills, adds_up, writes_past_autograd, moves, trains])
def test_what_is_left_is_noticed(function: Callable[..., Any]) -> None:
    subject = model(function)
    with traces(subject) as left:
        assert not left()
        subject(X)
    assert left()


def test_a_run_that_only_reads_leaves_none() -> None:
    subject = model(lambda m, x: m.layer(x) * m.seen + m.calls)
    with traces(subject) as left:
        subject(X)
    assert not left()
