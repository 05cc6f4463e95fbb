"""What plans are made from: reference answers that are run once, and problems by strategy and format."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.measure.noise import FP32Runs
from auditor.numerics.metrics import output_error
from auditor.plan.units import unit_of
from auditor.plan.workbench import Workbench
from auditor.records import Noise
from tests.support.capturing import Function
from tests.support.planning import bench_of
from tests.support.small_models import Mlp
from tests.support.subjects import normal, seeded

ONE, TWO = torch.zeros(2), torch.ones(2)


def bench(**changes: Any) -> Workbench:
    return replace(bench_of(Function(lambda x: x + 1), ONE), **changes)


def test_references_are_run_once_per_batch() -> None:
    found = bench()
    batch = found.subject.batches[0]
    first = found.reference(batch)
    assert first[0].tolist() == [1.0, 1.0]
    assert found.reference(batch) is first


def test_a_plan_may_err_by_the_budget_or_by_what_is_no_error_here() -> None:
    assert bench().max_error == 0.01
    assert bench(noise=FP32Runs(Noise(error=0.001, floor=0.003))).max_error == 0.01
    assert bench(noise=FP32Runs(Noise(error=0.01, floor=0.03))).max_error == 0.03


def largest(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    return max(float((r - c.float()).abs().max()) for r, c in zip(reference, low, strict=True))


def in_percent(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    return 100 * output_error(reference, low)


def flips(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    return float(sum((r.sign() != c.sign()).sum() for r, c in zip(reference, low, strict=True)))


def test_the_unit_by_hand() -> None:
    # BF16 has steps of 1 between 128 and 256: 200.4 becomes 200, an error of 0.4 and a relative one of 0.4 / 200.4
    assert unit_of(largest, [torch.tensor([200.4])], 1.0) == pytest.approx(200.4, rel=1e-4)
    assert unit_of(in_percent, [normal(8)], 1.0) == pytest.approx(100)


@pytest.mark.parametrize("outputs", [[torch.tensor([1.0, 2.0])], [normal(8)]])
def test_a_metric_that_rounding_does_not_move_has_no_unit(outputs: list[Tensor]) -> None:
    assert unit_of(flips, outputs, 1.0) == 1.0


def test_a_budget_beyond_what_the_solver_can_tell_from_a_prohibition_leaves_errors_relative() -> None:
    assert unit_of(in_percent, [normal(8)], 1000.0) == 1.0


def test_the_scale_of_a_metric_does_not_matter() -> None:
    def answers(**options: object) -> auditor.Audit:
        model: nn.Module = seeded(Mlp)
        return auditor.audit(model, normal(4, 6), formats=("bf16",), strategies=("cast",), device="cpu", **options)

    plain, scaled = answers(max_error=0.004), answers(max_error=0.4, metric=in_percent)
    verdicts = [[(r.node.name, r.verdicts["bf16"].verdict) for r in audit.nodes] for audit in (plain, scaled)]
    assert verdicts[0] == verdicts[1]
    ours, theirs = plain.plans["cast_bf16"], scaled.plans["cast_bf16"]
    assert {path: choice.precision for path, choice in ours.scopes.items()} == {
        path: choice.precision for path, choice in theirs.scopes.items()
    }
    assert theirs.predicted_error == pytest.approx(100 * ours.predicted_error)
    assert theirs.measured_error == pytest.approx(100 * ours.measured_error)
