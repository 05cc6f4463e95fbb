"""Which values decide a discrete result, or stand under an operation that is singular at zero, on small graphs by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from auditor.measure.causes import deciding, guarding
from tests.support.capturing import Function
from tests.support.subjects import capture_of, effects_of, measurement_of


def decide(function: object, *inputs: Tensor) -> set[str]:
    return deciding(capture_of(Function(function), *inputs))  # type: ignore[arg-type]


X = torch.linspace(-1, 2, 6).reshape(2, 3)


def test_the_last_three_operations_before_a_choice() -> None:
    def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().cos().tanh().exp()  # four, of which the first is too far away
        return y.argmax(-1), x.sinh()

    assert decide(chosen, X) == {"cos", "tanh", "exp"}


def test_a_mask_decides_and_its_reader_does_not() -> None:
    assert decide(lambda x: (x.exp() > 1.0) * x.cos(), X) == {"exp"}


def test_without_a_floating_output_every_floating_value_decides() -> None:
    assert decide(lambda x: x.sin().cos().tanh().exp().argmax(-1), X) == {"sin", "cos", "tanh", "exp"}


def test_questions_about_shape_or_finiteness_are_no_choices() -> None:
    assert decide(lambda x: (torch.isnan(x.exp()), torch.ones_like(x.sin(), dtype=torch.long), x.tanh()), X) == set()


def test_two_choices_reach_back_each_by_its_own_way() -> None:
    def routed(x: Tensor) -> Tensor:
        first = x.exp().argmax(-1, keepdim=True)
        return x.cos().gather(-1, first).floor().long() + x.tanh()

    assert decide(routed, X) == {"exp", "cos", "gather", "floor"}


Y = torch.linspace(1, 2, 4).reshape(2, 2)


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
    captured = capture_of(Function(lambda x: divided(x, x.sinh())), Y)
    assert guarding(captured) & captured.nodes.keys() == {"sinh"}


@pytest.mark.parametrize(
    "harmless", [lambda x, g: g / x.exp(), lambda x, g: g**2 * x, lambda x, g: g**0 * x, lambda x, g: g.exp() * x]
)
def test_numerators_and_powers_are_no_guards(harmless: Callable[..., Tensor]) -> None:
    captured = capture_of(Function(lambda x: harmless(x, x.sinh())), Y)
    assert "sinh" not in guarding(captured)


def test_a_row_that_vanishes_as_a_whole_is_run() -> None:
    x = torch.linspace(1, 2, 64).repeat(4, 1)
    x[0] *= 1e-5
    measured = measurement_of(Function(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))), x)
    found = effects_of(measured)["pow_1"]["fp16"]
    assert found.decided_by == "re-run"
    assert not found.isolated < 1
