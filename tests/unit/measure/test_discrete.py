"""Which floating values decide a discrete result, found on small graphs by name."""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.measure.discrete import deciding
from tests.capturing import Function
from tests.subjects import capture_of


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
