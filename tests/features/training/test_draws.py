"""Errors of gradients at slightly changed weights: how many are drawn, and on which side of a threshold their median is."""

from __future__ import annotations

import random
from statistics import median

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.features.training.draws import interval_of, side_of
from auditor.records import Audit
from auditor.training.limits import MOST_TOLERATED, TOLERATED, tolerated_error


def test_the_interval_contains_the_median_nineteen_times_in_twenty() -> None:
    rng = random.Random(0)
    for count in (6, 9, 15):
        inside = 0
        for _ in range(4000):
            least, most = interval_of([rng.paretovariate(1.0) for _ in range(count)])
            inside += least <= 2.0 <= most  # 2: the median of this distribution, whose mean is infinite
        assert inside / 4000 >= 0.945


@pytest.mark.parametrize(
    ("errors", "side"),
    [
        ([0.01] * 5, "unclear"),
        ([0.01] * 6, "within"),
        ([0.2] * 6, "beyond"),
        ([0.01] * 5 + [0.2], "unclear"),
        ([0.01] * 8 + [0.2], "within"),
        ([0.2], "unclear"),
    ],
)
def test_the_side_of_a_threshold(errors: list[float], side: str) -> None:
    assert side_of(errors, 0.1) == side


def test_one_threshold_for_audit_and_rehearsal() -> None:
    assert tolerated_error(None) == tolerated_error(0.1) == TOLERATED
    assert tolerated_error(0.6) == pytest.approx(0.15)
    assert tolerated_error(40.0) == MOST_TOLERATED


class Matching(nn.Module):
    """Predictions that a loss matches to targets, as detectors do: a near tie may be matched otherwise in FP16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(24, 64))
        self.boxes = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.boxes(torch.relu(self.trunk(x)[:, None] + self.queries)).sigmoid()


def matched_loss(boxes: Tensor, targets: Tensor) -> Tensor:
    cost = torch.cdist(boxes.float(), targets.float())
    best = cost.argmin(1)
    return (boxes.gather(1, best[..., None].expand(-1, -1, 4)) - targets).abs().mean()


def matching_audit(seed: int) -> Audit:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(8, 32, generator=generator), torch.rand(8, 5, 4, generator=generator)
    return auditor.audit(Matching(seed), batch, mode="training", loss_fn=matched_loss, device="cpu", quick=True)


def verdict(audit: Audit) -> str:
    training = audit.training
    assert training is not None
    if training.format is not None:
        return training.format
    return "undecided" if "cannot tell" in training.recommendation else "none"


@pytest.mark.slow
def test_a_step_that_matches_gets_one_verdict_for_ten_seeds() -> None:
    verdicts = {seed: verdict(matching_audit(seed)) for seed in range(10)}
    assert len(set(verdicts.values()) - {"undecided"}) <= 1, verdicts


class Tie(nn.Module):
    """Two rows of a layer that differ by less than FP16 resolves: which of them is the maximum decides the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 8)
        with torch.no_grad():
            self.layer.weight[1] = self.layer.weight[0] + 1e-5
            self.layer.bias[1] = self.layer.bias[0]
            self.layer.bias[:2] += 4

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_draws_decide_where_one_error_does_not() -> None:
    """In the first step decisions flip, and whole rows of the gradient with them; at other weights there is no tie."""
    x = torch.rand(4, 16, generator=torch.Generator().manual_seed(2))
    audit = auditor.audit(Tie(), (x,), mode="training", loss_fn=lambda y: y.max(-1).values.sum(), device="cpu")
    training = audit.training
    assert training is not None
    first, *others = training.draws["fp16"]
    assert first > training.tolerated > training.errors["fp16"] == median((first, *others))
    assert len(others) >= 5
    assert side_of((first, *others), training.tolerated) == "within"
    assert training.format is not None


def test_the_weights_are_what_they_were() -> None:
    model = Matching(0)
    before = [p.detach().clone() for p in model.parameters()]
    batch = torch.randn(8, 32), torch.rand(8, 5, 4)
    auditor.audit(model, batch, mode="training", loss_fn=matched_loss, device="cpu", quick=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
