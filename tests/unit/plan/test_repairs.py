"""What a repair of the source gains: predicted from the model as it is, compared with the plan of the repaired model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit
from auditor.report.findings import causes
from auditor.report.view import ReportView
from auditor.reporters import html, text
from tests.support.thinned import thinned


class Blocks(nn.Module):
    """Layers with a statistic in between that overflows FP16; `repaired`: written as the rule's own fix writes it."""

    def __init__(self, repaired: bool, scale: float = 300.0, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))
        self.repaired, self.scale = repaired, scale

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            y = x * self.scale
            if self.repaired:
                length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
            else:
                length = y.square().sum(-1, keepdim=True).sqrt()
            x = x + length / (self.scale * 16)
        return x


def audit_of(model: nn.Module, *inputs: Tensor, **options: object) -> Audit:
    asked = {"strategies": ("cast",), **options}
    return auditor.audit(model.eval(), inputs, device="cpu", formats=("fp16",), **asked)


X = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def broken() -> Audit:
    return audit_of(Blocks(repaired=False), X)


def test_the_gain_agrees_with_the_repaired_model(broken: Audit) -> None:
    """The plan of the model with the repaired source is as fast as predicted, up to 15 %."""
    assert broken.repairs
    best = broken.repairs[0]
    fixed = audit_of(Blocks(repaired=True), X)
    fastest = max(plan.predicted_speedup for plan in fixed.plans.values() if plan.is_verified)
    assert best.speedup == pytest.approx(fastest, rel=0.15)
    assert best.gain == best.speedup / best.before > 1.05


def test_the_first_screen_says_what_a_repair_gains(broken: Audit) -> None:
    best = broken.repairs[0]
    said = f"is predicted at {best.speedup:.2f}x instead of {best.before:.2f}x"
    for page in (text(broken, width=400), html(broken)):
        assert said in " ".join(page.split())


def test_a_model_without_problems_has_no_repairs() -> None:
    healthy = audit_of(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), X)
    assert healthy.repairs == ()


class Gather(nn.Module):
    """Many cheap operations share a module with a sum of squares that overflows: the whole module is kept in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        size = (x * 300.0).square().sum(-1, keepdim=True).sqrt() / 300.0
        direction = 16.0 * x / size
        return (direction.sin() * direction.cos()).tanh()


@pytest.mark.parametrize("width", thinned([8, 64]))
def test_a_plan_that_gains_little_names_the_repair_first(width: int) -> None:
    """Without the repair, a narrow last layer saves nothing in low precision, and a wider one little."""
    little = audit_of(nn.Sequential(Gather(), nn.Linear(256, width)), X)
    best = little.repairs[0]
    assert best.before < 1.1 < best.speedup
    headline = ReportView(little).headline
    assert f"first; then FP16 with cast weights is predicted at {best.speedup:.2f}x" in headline
    assert ("This gains only" in headline) == (little.recommended is not None)


def test_a_plan_that_gains_enough_is_the_answer(broken: Audit) -> None:
    assert broken.repairs and broken.plans["cast_fp16"].speedup > 1.1
    assert "first; then" not in ReportView(broken).headline


def test_two_problems_in_one_module_are_repaired_together() -> None:
    """Either alone leaves the module in FP32: only the pair gains, and both are to do."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x.sigmoid() * 1.5
            energy = (x * 300.0).square().mean(-1, keepdim=True).sqrt()
            growth = (x.abs() + 11.0).exp().log()
            return x.tanh() + energy / 300.0 + growth / 50.0

    found = audit_of(nn.Sequential(nn.Linear(256, 256), Two()), X)
    most = max(found.repairs, key=lambda repair: repair.gain)
    alone = [repair.gain for repair in found.repairs if len(repair.causes) == 1]
    assert len(most.causes) == 2
    assert most.gain > 1.01 * max(alone, default=1.0)
    assert most.kept == 0
    assert sum(cause.gain > 1 for cause in causes(found).to_do) == 2


class Cached(nn.Module):
    """Keys are written into an FP32 cache, and a bias of positions is FP32: two problems of two dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        cache = torch.zeros(x.shape[0], 64, 64)
        keys = cache.index_copy(1, torch.arange(x.shape[1]), self.key(x))
        bias = -0.1 * torch.arange(64).float()
        scores = torch.baddbmm(bias.expand(*x.shape[:2], -1), self.query(x), keys.transpose(1, 2))
        return scores.softmax(-1)


def test_the_repair_of_one_line_with_two_dtypes_does_not_repair_another() -> None:
    """The fixes convert arguments in their own lines, so that either alone leaves the other line to raise an error."""
    found = audit_of(Cached(), torch.randn(4, 20, 64, generator=torch.Generator().manual_seed(1)))
    rules = {finding.cause: finding.rule for finding in found.findings}
    alone = {rules[repair.causes[0]] for repair in found.repairs if len(repair.causes) == 1}
    assert {"DTY001", "DTY002"} <= set(rules.values())
    assert not alone & {"DTY001", "DTY002"}


def causal(length: int) -> Tensor:
    return torch.full((length, length), -1e4).triu(1)


class Masked(nn.Module):
    """Three layers whose attention adds a mask that one line makes in FP32. repaired: in the queries' dtype, or, with
    `elsewhere`, with the probabilities converted, since the line of the mask is in a function that knows no dtype."""

    def __init__(self, repaired: bool, elsewhere: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 3 * 256) for _ in range(3))
        self.repaired, self.elsewhere = repaired, elsewhere

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            if self.elsewhere:
                mask = causal(x.shape[1])
            elif self.repaired:
                mask = torch.full((x.shape[1], x.shape[1]), -1e4, dtype=v.dtype).triu(1)
            else:
                mask = torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)
            p = (q @ k.transpose(1, 2) / 16.0 + mask).softmax(-1)
            if self.elsewhere and self.repaired:
                p = p.to(v.dtype)
            x = x + p @ v
        return x


TOKENS = torch.randn(8, 256, 256, generator=torch.Generator().manual_seed(1))


def test_the_repair_of_a_line_holds_whenever_the_line_runs() -> None:
    (repair,) = audit_of(Masked(repaired=False, elsewhere=False), TOKENS).repairs
    plan = audit_of(Masked(repaired=True, elsewhere=False), TOKENS).plan
    assert plan is not None
    assert repair.kept == 0
    assert repair.speedup == pytest.approx(plan.speedup, rel=0.05)


def test_a_conversion_that_gains_nothing_over_the_plan_promises_nothing() -> None:
    broken = audit_of(Masked(repaired=False, elsewhere=True), TOKENS)
    plan = audit_of(Masked(repaired=True, elsewhere=True), TOKENS).plan
    assert broken.plan is not None and plan is not None
    assert plan.speedup <= broken.plan.speedup
    assert broken.repairs == ()
