"""What plans are made from: reference answers that are run once, and problems by strategy and format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from auditor.measure.noise import Heard
from auditor.plan.workbench import Workbench
from auditor.records import Noise
from tests.support.planning import bench_of


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


ONE, TWO = torch.zeros(2), torch.ones(2)


def bench(**changes: Any) -> Workbench:
    return replace(bench_of(AddOne(), ONE), **changes)


def test_references_are_run_once_per_batch() -> None:
    found = bench()
    batch = found.subject.batches[0]
    first = found.reference(batch)
    assert first[0].tolist() == [1.0, 1.0]
    assert found.reference(batch) is first


def test_held_out_inputs_are_the_checks_where_there_are_any() -> None:
    found = bench()
    assert found.checks == found.subject.batches
    held = replace(found.subject, held_out=(((TWO,), {}),))
    assert bench(subject=held).checks == held.held_out


def test_answers_with_gradients_or_why_there_are_none() -> None:
    assert bench(noise=Heard(graded=[TWO])).graded == [TWO]
    assert bench(noise=Heard(graded="RuntimeError: for inference")).graded is None


def test_a_plan_may_err_by_the_budget_or_by_what_is_no_error_here() -> None:
    assert bench().max_error == 0.01
    assert bench(noise=Heard(Noise(error=0.001, floor=0.003))).max_error == 0.01
    assert bench(noise=Heard(Noise(error=0.01, floor=0.03))).max_error == 0.03
