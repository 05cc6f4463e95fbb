"""A small model that learns in FP16 and BF16 for real, for a few steps: what the window and the outlook promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.learning import Task, loop
from benchmarks.training import OPTIMIZERS, scale_rows, update_rows
from tests.unit.training.conftest import Net, loss_fn


def shifted(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Learn to add one, modulo twelve."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, 12, (16, 6), generator=generator)
        yield tokens, (tokens + 1) % 12


TASK = Task("adding", lambda: Net().requires_grad_(True), loss_fn, shifted, rate=1e-2)


def test_scales_inside_and_outside_of_the_window() -> None:
    found = {row.label: row for row in scale_rows(TASK, steps=25)}
    assert found["recommended"].skipped == found["none"].skipped == 0
    assert found["above"].predicted_skipped == 6
    assert 6 <= found["above"].skipped <= 8
    for row in found.values():
        assert row.flushed == pytest.approx(row.predicted, rel=0.2, abs=0.005)
    assert found["below"].predicted > 0.05
    assert found["recommended"].final_loss == pytest.approx(found["FP32"].final_loss, rel=0.05)


def test_bf16_weights_lose_the_predicted_updates() -> None:
    master, stored = update_rows(TASK, 25, ["Adam, 1e-4"])
    assert (master.lost, master.stored) == (0.0, "fp32")
    assert stored.lost == pytest.approx(stored.predicted, abs=0.03)
    assert stored.lost > 0.3
    assert stored.final_loss >= master.final_loss - 1e-3
    assert set(OPTIMIZERS) >= {"Adam, 1e-4", "SGD, 0.1"}


def test_a_loop_repeats_to_the_bit() -> None:
    first, second = (loop(TASK, 1, "fp16", scale=2.0**10).run(5).losses for _ in range(2))
    assert first == second
