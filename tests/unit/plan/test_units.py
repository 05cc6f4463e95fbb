"""A metric of the user's own: what it makes of errors, and that its scale does not matter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.numerics.metrics import output_error
from auditor.plan.units import unit_of
from tests.support.small_models import Mlp
from tests.support.subjects import normal, seeded


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
