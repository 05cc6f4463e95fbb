"""What arithmetic leads to a value: whole numbers, phases, divisors, cancelled bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.capturing import facts_of


def test_whole_numbers_come_from_integers() -> None:
    def function(x: Tensor, ids: Tensor) -> list[Tensor]:
        return [
            x + ids.to(x.dtype).view(2, 1),
            x * torch.arange(2, dtype=x.dtype),
            x * torch.arange(0, 1, 0.5, dtype=x.dtype),
            x * (ids > 0).to(x.dtype),
            (ids * 2).to(x.dtype) - 1,
        ]

    facts = facts_of(function, torch.ones(2, 2), torch.tensor([1, 2])).facts
    assert [name for name, fact in facts.items() if fact.whole_numbers] == ["to", "arange", "to_2"]
    assert [name for name, fact in facts.items() if fact.reads_whole_numbers] == ["add", "mul", "sub"]
    assert (facts["to"].input_dtype, facts["to"].dtype, facts["arange"].input_dtype) == ("int64", "float32", None)


def test_what_a_sine_is_taken_of_is_a_phase() -> None:
    def function(x: Tensor, f: Tensor) -> list[Tensor]:
        return [torch.cat([x.exp() * f.view(2) + 1, x]).sin().tanh(), (x - f).abs().sin(), x.neg().cos().sin()]

    facts = facts_of(function, torch.ones(2), torch.ones(2)).facts
    assert [name for name, fact in facts.items() if fact.in_a_phase] == [
        *("exp", "view", "mul", "add", "cat"),
        *("abs_1", "neg", "cos"),
    ]


def test_bits_that_cancel() -> None:
    facts = facts_of(lambda x, y: (x - y, x + y, x - 1000.0), torch.full((2,), 1024.0), torch.full((2,), 1022.0)).facts
    assert facts["sub"].cancelled_bits == 9  # 1024 / 2
    assert facts["add"].cancelled_bits == pytest.approx(-1, abs=0.01)
    assert facts["sub_1"].cancelled_bits is None


def test_the_smallest_divisor() -> None:
    toy = facts_of(lambda x, y: (x / y.view(2), y.log(), y / 4.0, x * y), torch.ones(2), torch.tensor([0.0, 1e-9]))
    facts = toy.facts
    assert facts["div"].divisor_min_abs == facts["log"].divisor_min_abs == pytest.approx(1e-9)
    assert facts["div_1"].divisor_min_abs is facts["mul"].divisor_min_abs is None
