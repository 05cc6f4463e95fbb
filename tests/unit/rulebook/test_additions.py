"""Runs of additions: their lengths, and what a format loses in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.capturing import facts_of


def test_a_run_of_additions_is_counted_at_its_end() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        total = x
        for _ in range(3):
            total = 0.5 * total + y.tanh()
        return [(total - x).exp() + y, x + y]

    facts = facts_of(function, torch.ones(2), torch.ones(2)).facts
    # a difference is not part of a run, and exp starts afresh
    runs = {name: fact.additions for name, fact in facts.items() if fact.additions}
    assert runs == {"add_2": 3, "add_3": 1, "add_4": 1}


def test_updates_below_half_a_spacing_add_up() -> None:
    def function(x: Tensor) -> Tensor:
        total = x
        for _ in range(4):
            total = total + 0.003 * x
        return total + 0.5

    facts = facts_of(function, torch.tensor([1.0, 0.5])).facts
    # at 1 BF16 numbers are 1/128 apart, FP16 numbers 1/1024: 0.003 is below 1/256, and above 1/2048
    assert facts["add_3"].additions == 4
    assert facts["add_3"].absorbed["bf16"] == pytest.approx(4 * 0.003 * 128)
    assert facts["add_3"].absorbed["fp16"] == 0
    low = torch.tensor([1.0, 0.5]).bfloat16()
    total = low
    for _ in range(4):
        total = total + 0.003 * low
    assert total[0] == 1  # where it is largest, nothing arrived
