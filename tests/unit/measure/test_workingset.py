"""The operation that needs most memory by itself."""

from __future__ import annotations

import torch
from torch import nn

from auditor.measure.measure import AT_ONCE, working_set
from tests.support.subjects import capture_of


def test_it_is_the_one_that_reads_and_gives_most() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    assert working_set(capture_of(model, torch.randn(3, 8))) == AT_ONCE * 4 * (8 * 64 + 64 + 3 * 8 + 3 * 64)


def test_what_an_operation_reads_twice_counts_once() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x

    assert working_set(capture_of(Square(), torch.randn(10, 10))) == AT_ONCE * 4 * 200
