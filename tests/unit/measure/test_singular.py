"""Which values stand under an operation that is singular at zero, found on small graphs by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from auditor.measure.singular import guarding, upstream
from tests.capturing import Function
from tests.subjects import capture_of

X = torch.linspace(1, 2, 4).reshape(2, 2)


@pytest.mark.parametrize(
    "divided",
    [
        lambda x, g: x / g,
        lambda x, g: torch.true_divide(x, g),
        lambda x, g: x.fmod(g),
        lambda x, g: torch.atan2(x, g),
        lambda x, g: torch.addcdiv(x, x, g),
        lambda x, g: x * g.reciprocal(),
        lambda x, g: x * g.rsqrt(),
        lambda x, g: x * g.log(),
        lambda x, g: x * g**-2,
    ],
)
def test_what_stands_where_a_zero_changes_everything(divided: Callable[..., Tensor]) -> None:
    captured = capture_of(Function(lambda x: divided(x, x.sinh())), X)
    assert guarding(captured) & captured.nodes.keys() == {"sinh"}


@pytest.mark.parametrize(
    "harmless", [lambda x, g: g / x.exp(), lambda x, g: g**2 * x, lambda x, g: g**0 * x, lambda x, g: g.exp() * x]
)
def test_numerators_and_powers_are_no_guards(harmless: Callable[..., Tensor]) -> None:
    captured = capture_of(Function(lambda x: harmless(x, x.sinh())), X)
    assert "sinh" not in guarding(captured)


def test_three_operations_back_and_no_further() -> None:
    captured = capture_of(Function(lambda x: x.sin().cos().tanh().exp().log()), X)
    assert guarding(captured) == {"cos", "tanh", "exp"}
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    assert {node.name for node in upstream([nodes["tanh"]])} == {"tanh", "cos", "sin"}
