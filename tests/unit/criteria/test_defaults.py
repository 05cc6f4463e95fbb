"""Discrete outputs may not flip unless that is allowed; what else the recording shows is proposed, and said of nothing
else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit
from auditor.report.reporters import REPORTERS
from tests.support.subjects import normal


def net(forward: Any) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 5)

        def forward(self, *inputs: Tensor) -> Any:
            return forward(self, *inputs)

    return Net().eval()


def audited(forward: Any, *inputs: Tensor, **how: Any) -> Audit:
    return auditor.audit(net(forward), inputs or (normal(32, 6),), **{"formats": "bf16", "strategies": "cast", **how})


def proposals(audit: Audit) -> dict[str, str]:
    return {one.output: one.criterion for one in audit.proposals}


def near_ties(self: Any, x: Tensor) -> dict[str, Tensor]:
    """A mask of what is above the reference's own values: rounding flips about half of it, unless the layer is FP32."""
    y = self.body(x)
    return {"y": y, "mask": y > THRESHOLD}


with torch.no_grad():
    THRESHOLD = net(lambda self, x: self.body(x))(normal(32, 6)) * (1 + 1e-4)


def test_a_mask_may_not_flip_by_default() -> None:
    found = audited(near_ties)
    assert found.criteria == ("mask: flips <= 0", "the other outputs: rel_l2 <= 0.01")
    assert found.baselines["cast_bf16"].criteria[0].value > 0.01
    assert not found.baselines["cast_bf16"].criteria[0].holds
    assert all(plan.verification.criteria[0].value == 0 for plan in found.plans.values() if plan.is_verified)
    held = next(one for one in found.proposals if one.holds)
    assert (held.output, held.criterion) == ("mask", "mask: flips <= 0")
    flat = " ".join(REPORTERS["text"](found).split())
    assert "By default no entry of mask may differ" in flat
    assert "--criterion 'mask: flips <= X' allows a share X of the entries to differ" in flat


def test_some_flips_are_allowed_by_a_criterion_or_a_metric_of_ones_own() -> None:
    allowed = audited(near_ties, criteria="mask: flips <= 1")
    assert allowed.criteria == ("mask: flips <= 1", "the other outputs: rel_l2 <= 0.01")
    assert allowed.plans["cast_bf16"].is_verified
    assert allowed.plans["cast_bf16"].kept_modules == ()
    assert not any(one.holds for one in allowed.proposals)
    own = audited(near_ties, metric=lambda r, c: float((r[0] - c[0].float()).norm() / r[0].norm()))
    assert (own.criteria, own.proposals) == ((), ())


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda self, x: self.head(self.body(x)).log_softmax(-1), {"output": "output: nats <= 0.02"}),
        (lambda self, x: self.body(x).log_softmax(0).view(-1), {"output": "output: nats(dim=0) <= 0.02"}),
        (lambda self, x: self.head(self.body(x)), {"output": "output: kl <= 0.001"}),
        (lambda self, x: self.head(self.body(x)).reshape(4, 8, 5), {"output": "output: kl <= 0.001"}),
        (lambda self, x: self.head(self.body(x)).softmax(-1), {}),
        (lambda self, x: self.head(self.body(x))[:, :1].relu(), {}),
        (lambda self, x: self.body(x).tanh(), {}),
    ],
)
def test_log_probabilities_and_logits_are_known_by_their_last_operation(forward: Any, expected: dict[str, str]) -> None:
    assert proposals(audited(forward)) == expected


def decoded(self: Any, x: Tensor, grid: Tensor) -> Tensor:
    return (self.body(x)[:, 0] + grid + 0.5) * 8


def test_positions_that_whole_numbers_are_added_into_may_be_in_pixels() -> None:
    inputs = normal(32, 6), torch.arange(32) + 100
    found = audited(decoded, *inputs)
    assert proposals(found) == {"output": "output: max_abs <= 0.5"}
    assert found.plans["cast_bf16"].kept_modules == ()  # an error of 0.3 % is within the budget, and pixels off
    set_ = audited(decoded, *inputs, criteria=found.proposals[0].criterion)
    assert set_.baselines["cast_bf16"].criteria[0].value > 0.5
    assert set_.plans["cast_bf16"].is_verified
    assert set_.plans["cast_bf16"].verification.criteria[0].value <= 0.5
    scaled = audited(lambda self, x, m: self.body(x) * m[:, None], normal(32, 6), torch.ones(32, dtype=torch.long))
    assert proposals(scaled) == {}


def test_an_output_far_worse_than_the_rest_is_named() -> None:
    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x).tanh()
        return {"large": y, "small": (y[:, :1] + 1 - 1 - y[:, :1] * 0.999).tanh()}

    found = audited(forward)
    plan = found.plans["cast_bf16"]
    assert plan.is_verified
    error = plan.verification.apart["small"]
    assert set(plan.verification.apart) == {"small"}
    assert error > 10 * plan.measured_error
    (one,) = found.proposals
    assert (one.output, one.criterion) == ("small", "small: rel_l2 <= 0.01")
    assert (
        f"its own relative error is {error:.2g} in BF16 with cast weights, {error / plan.measured_error:,.0f} times"
        in one.because
    )
    assert proposals(audited(forward, criteria="small: rel_l2 <= 1000")) == {}
