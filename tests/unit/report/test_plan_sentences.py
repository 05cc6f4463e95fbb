"""What the verdict, the answers and the recommendation say of plans is so: numbers against plan.json, claims against runs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records.audit import Audit
from auditor.report.kept import islands
from auditor.report.view import view
from tests.support.subjects import normal, seeded
from tests.support.unet import UNet


class Idle(nn.Module):
    """Autocast lowers nothing in it: the table's rows are in FP32, and so is what is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Raised(nn.Module):
    """Narrow layers between norms that autocast raises: BF16 holds one by one, not all together, and casts take its time."""

    def __init__(self) -> None:
        super().__init__()
        named = dict(zip("abcdefgh", range(8, 16), strict=True))
        self.layers = nn.ModuleDict({name: nn.Linear(width, width + 1) for name, width in named.items()})
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width + 1) for name, width in named.items()})

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers.values(), self.norms.values(), strict=True):
            x = norm(layer(x)).sin()
        return x


class Exact(nn.Module):
    """Amplifies every rounding: nothing low is within the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y + 4096.0) - 4096.0 - y + 1e-3 * y.sum()


CASES = {
    "unet in training": (UNet, (normal(1, 3, 16, 16), torch.tensor([17])), {"use": "training", "formats": ("fp16",)}),
    "idle": (Idle, (torch.arange(6)[None],), {"strategies": ("autocast",)}),
    "raised": (Raised, (normal(512, 8),), {"strategies": ("autocast",), "formats": ("bf16",), "max_error": 0.006}),
    "exact": (Exact, (normal(4, 16),), {}),
}


@pytest.fixture(scope="module", params=CASES)
def audit(request: pytest.FixtureRequest) -> Audit:
    model, inputs, asked = CASES[request.param]
    return auditor.audit(seeded(model), inputs, device="cpu", **asked)


def test_verdict_reason_table_and_count_agree(audit: Audit) -> None:
    seen = view(audit)
    if seen.chosen is None:
        assert seen.headline == audit.recommendation
        assert seen.headline.startswith("Keep it in FP32: ")
        return
    plan = seen.chosen.plan
    listed = [path for island in islands(plan) for path in island.paths]
    assert sorted(listed) == sorted(plan.kept)
    number = re.search(r"keeping (\d+) modules? in FP32", seen.headline)
    assert int(number[1]) if number else len(plan.kept) == 0
    said = re.search(r"(\d+) modules? stays? FP32", audit.recommendation)
    assert (int(said[1]) if said else 0) == len(plan.kept)
    if not plan.kept:
        assert "nothing has to stay" in seen.headline + audit.recommendation
    assert f"error {plan.measured_error:.2g}" in audit.recommendation
    assert f"{plan.low_precision_flops:.0%} of the FLOPs low" in audit.recommendation


def test_why_there_is_no_plan(audit: Audit) -> None:
    """Each of four sentences, against what runs low and what runs of it held."""
    if audit.recommended is not None:
        return
    said = audit.recommendation
    held = [plan for plan in audit.plans.values() if plan.verified]
    if "nothing in it runs low" in said:
        assert all(float(_all_low(audit, plan.format)) == 0 for plan in held)
        return
    moved = any(float(_all_low(audit, plan.format)) > 0 for plan in held)
    whole = any(plan.least == () for plan in held)
    idle = any(reason.kind == "no-gain" and reason.adds for plan in held for reason in plan.reasons)
    assert ("in low precision saves no time" in said) == (moved and (whole or idle))
    assert ("no plan holds the error budget of" in said) != (moved and (whole or idle))


def _all_low(audit: Audit, fmt: str) -> Tensor:
    """Error of the model under one autocast."""
    (args, kwargs), dtype = audit.live.batches[0], {"fp16": torch.float16, "bf16": torch.bfloat16}[fmt]
    with torch.no_grad():
        expected = audit.live.model(*args, **kwargs)
        with auditor.emulate("cuda"), torch.autocast("cuda", dtype=dtype):
            got = audit.live.model(*args, **kwargs)
    return (got.float() - expected).norm() / expected.norm()
