"""Parts of a batch, with gradients that are means worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.step import bind_step, run_step
from auditor.training.objective import training_subject
from auditor.training.own import Lowering
from auditor.training.stage import batch_sizes
from auditor.training.step import capture_step, step_batches
from tests.support.stepping import Scaled


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).mean()


def rows(
    model: nn.Module, x: Tensor, targets: Tensor, **lowerings: Lowering
) -> list[tuple[int, float, dict[str, float | None]]]:
    subject = training_subject(model.train(), (x, targets), {}, mean)
    captured = capture_step(subject, ("fp16", "bf16"))
    whole = run_step(bind_step(captured, subject, step_batches(subject)[0], 0))
    found = batch_sizes(subject, whole, dict.fromkeys(lowerings, 0.25), lowerings)
    return [(row.samples, row.gradient_norm, dict(row.error)) for row in found]


def test_quarters_halves_and_the_whole() -> None:
    # The gradient by w is the mean of x t = 1 .. 8: 4.5. Halves: 2.5 and 6.5; the first two quarters: 1.5 and 3.5.
    found = rows(Scaled(), torch.arange(1.0, 9.0)[:, None], torch.ones(8, 1))
    assert [samples for samples, _, _ in found] == [2, 4, 8]
    norms = [norm for _, norm, _ in found]
    assert norms == pytest.approx([math.sqrt((1.5**2 + 3.5**2) / 2), math.sqrt((2.5**2 + 6.5**2) / 2), 4.5])


def test_a_batch_of_one_cannot_be_cut() -> None:
    assert [samples for samples, _, _ in rows(Scaled(), torch.ones(1, 1), torch.ones(1, 1))] == [1]


def test_errors_are_those_of_low_steps_and_the_wholes_own_is_taken_as_given() -> None:
    found = rows(Scaled(), torch.ones(4, 1), torch.ones(4, 1), bf16=Lowering("bf16"))
    assert [row[2] for row in found] == [{"bf16": 0.0}, {"bf16": 0.0}, {"bf16": 0.25}]  # ones are exact
