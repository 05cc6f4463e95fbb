"""Which values stand under an operation that is singular at zero, found on small graphs by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from auditor.measure.singular import guarding, upstream
from tests.brute_force import true_isolated
from tests.capturing import Function
from tests.subjects import capture_of, effects_of, measurement_of

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


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_an_entry_that_vanishes_in_a_sum_is_told() -> None:
    x = torch.linspace(1, 2, 64).repeat(4, 1)
    x[:, 0] = 1e-5  # its square is none in FP16
    measured = measurement_of(Function(rms_norm), x)
    assert measured.errors["pow_1"]["fp16"].underflow
    found = effects_of(measured)["pow_1"]["fp16"]
    assert found.isolated == pytest.approx(true_isolated(measured, "pow_1", "fp16"), rel=0.3)


def test_a_row_that_vanishes_as_a_whole_is_run() -> None:
    x = torch.linspace(1, 2, 64).repeat(4, 1)
    x[0] *= 1e-5
    measured = measurement_of(Function(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))), x)
    found = effects_of(measured)["pow_1"]["fp16"]
    assert found.decided_by == "re-run"
    assert not found.isolated < 1
