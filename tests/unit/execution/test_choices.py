"""Choices on values that are a little off: what counts as one, and when another error would change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from auditor.execution.rest import differing, is_choice, provoked
from tests.capturing import Function
from tests.subjects import capture_of


def node_of(function: Callable[..., Any], x: Tensor) -> fx.Node:
    graph = capture_of(Function(lambda x: (function(x), x * 2.0)), x).graph_module.graph
    return next(node for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.argmax(-1), True),
        (lambda x: x > 0.5, True),
        (lambda x: x.topk(1), True),
        (lambda x: x.round(), True),
        (lambda x: x.floor(), True),
        (lambda x: x.sign(), True),
        (lambda x: x.isfinite(), False),
        (lambda x: x.exp(), False),
    ],
)
def test_what_is_a_choice(function: Callable[..., Any], expected: bool) -> None:
    x = torch.tensor([[0.2, 0.9]])
    assert is_choice(node_of(function, x), function(x)) == expected


def after(function: Callable[..., Any], x: Tensor, now: Tensor) -> Any:
    return provoked(node_of(function, x), function(now), function(x), lambda source: x, lambda source: now)


def test_an_error_that_cancels_in_the_group_may_decide_alone() -> None:
    x = torch.tensor([[1.0, 1.001, -2.0]])
    now = x + torch.tensor([[0.01, 0.01, 0.01]])  # both are off by as much: the choice is the same
    assert now.argmax(-1).item() == x.argmax(-1).item() == 1
    assert after(lambda x: x.argmax(-1), x, now).item() == 0
    assert after(lambda x: x.argmax(-1), x, x + 1e-6).item() == 1


def test_numbers_beside_a_choice_stay_as_they_are() -> None:
    x = torch.tensor([[1.0, 1.001, -2.0]])
    now = x + 0.01
    values, places = after(lambda x: x.max(-1), x, now)
    assert values.item() == now.max().item()
    assert places.item() == 0


def test_rounding_to_whole_numbers_is_a_choice_of_numbers() -> None:
    x = torch.tensor([2.499, 7.0])
    node = node_of(lambda x: x.round(), x)
    assert after(lambda x: x.round(), x, x - 0.01).tolist() == [3.0, 7.0]
    assert differing(torch.tensor([3.0, 7.0]), x.round(), node) == 1


@pytest.mark.parametrize("now", [torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])])
def test_without_an_error_or_with_an_infinite_one_nothing_is_tried(now: Tensor) -> None:
    x = torch.tensor([1.0, 2.0])
    assert torch.equal(after(lambda x: x.argmax(-1), x, now), now.argmax(-1))
