"""What the verdict, the answers and the recommendation say of plans is so: numbers against plan.json, claims against runs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.patch.table import plan_table
from auditor.patch.temporary import patched
from auditor.records.audit import Audit
from auditor.report.questions import questions
from auditor.report.reporters import rendered
from auditor.report.view import islands, view
from tests.small_models import ConvNet
from tests.subjects import normal, seeded
from tests.unet import UNet


class Idle(nn.Module):
    """Nothing in it is a product, and it is bound by one small vector: low, it casts more than it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Exact(nn.Module):
    """Amplifies every rounding: nothing low is within the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y + 4096.0) - 4096.0 - y + 1e-3 * y.sum()


class Rooted(nn.Module):
    """The root itself overflows between two layers, so that the whole model's scope is FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 300
        return self.last(x / x.pow(2).mean(-1, keepdim=True).sqrt())


CASES = {
    "unet": (UNet, (normal(1, 3, 16, 16), torch.tensor([17])), {}),
    "unet in training": (UNet, (normal(1, 3, 16, 16), torch.tensor([17])), {"use": "training", "formats": ("fp16",)}),
    "conv": (ConvNet, (normal(2, 3, 8, 8),), {"max_error": 0.004}),
    "idle": (Idle, (torch.arange(6)[None],), {"strategies": ("autocast",)}),
    "exact": (Exact, (normal(4, 16),), {}),
    "rooted": (Rooted, (normal(32, 64),), {}),
}


@pytest.fixture(scope="module", params=CASES)
def audit(request: pytest.FixtureRequest) -> Audit:
    model, inputs, asked = CASES[request.param]
    return auditor.audit(seeded(model), inputs, device="cpu", **asked)


def asked(audit: Audit, question: str) -> str:
    return next(answer.answer for answer in questions(audit) if answer.question == question)


def test_verdict_reason_table_and_count_agree(audit: Audit) -> None:
    seen = view(audit)
    if seen.chosen is None:
        assert seen.headline.startswith("Keep it in FP32: ")
        assert audit.recommendation.startswith("Run it in FP32: ")
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


def test_a_module_called_fp32_computes_in_fp32_and_others_do_not(audit: Audit) -> None:
    plan = audit.plans.get(audit.recommended or "")
    for report in audit.nodes if plan else ():
        if report.planned is not None and report.node.owner in plan.kept and report.node.floating:
            assert report.planned.output in ("float32", "float64"), report.node.name


def test_the_recommended_plan_is_the_fastest_for_its_use(audit: Audit) -> None:
    held = [p for p in audit.plans.values() if p.verified and (p.low_precision_flops > 0 or p.predicted_speedup > 1)]
    held = [p for p in held if p.predicted_speedup >= 1 or all(c.precision != "fp32" for c in p.scopes.values())]
    if audit.use == "training":
        assert audit.recommended is not None
        assert audit.recommended.startswith("autocast")
        held = [plan for plan in held if plan.strategy == "autocast"]
    fastest = max((plan.predicted_speedup for plan in held), default=None)
    if fastest is None:
        assert audit.recommended is None
        return
    assert audit.plans[audit.recommended or ""].predicted_speedup >= 0.98 * fastest
    for use, name, speed in re.findall(r"(inference|training): (\w+_\w+) ([\d.]+)x", audit.recommendation):
        assert audit.plans[name].predicted_speedup == pytest.approx(float(speed), abs=0.005)
        assert use == "inference" or name.startswith("autocast")


def test_the_least_that_must_stay_is_that_of_the_plan_and_runs(audit: Audit) -> None:
    answer = asked(audit, "What is the least that must stay FP32?")
    plan = audit.plans.get(audit.recommended or "")
    if plan is None:
        assert answer.startswith("All of it")
        return
    assert plan.least is not None
    count = re.search(r": (\d+) modules?, ", answer)
    assert (int(count[1]) if count else 0) == len(plan.least)
    assert ("The plan also leaves" in answer) == bool(set(plan.kept) - set(plan.least))


def test_why_there_is_no_plan(audit: Audit) -> None:
    if audit.recommended is not None:
        return
    idle = "saves no time" in view(audit).headline
    assert idle == ("there is no time to gain by it" in audit.recommendation)
    for plan in audit.plans.values():
        kinds = {reason.kind for reason in plan.reasons if reason.modules}
        assert (kinds <= {"no-gain", "not-floating"}) == idle, (plan.name, kinds)
    if not idle:
        assert "no plan met the error budget" in view(audit).headline


def test_no_reason_has_the_same_number_twice(audit: Audit) -> None:
    for plan in audit.plans.values():
        for reason in plan.reasons:
            numbers = re.search(r"from (\S+) to (\S+?)[,;]", reason.words)
            assert numbers is None or numbers[1] != numbers[2]
    for form in ("text", "md"):
        text = rendered(form, audit)
        for before, after in re.findall(r"from ([\d.e-]+)\s+to ([\d.e-]+)", text):
            assert before.rstrip(".") != after.rstrip(".")


def test_whole_numbers_are_not_kept_by_the_author(audit: Audit) -> None:
    for report in audit.nodes:
        for verdict in report.verdicts.values():
            assert report.node.floating or "author keeps it in FP32" not in verdict.reason


def test_the_plan_patched_by_hand_has_its_error(audit: Audit) -> None:
    for plan in audit.plans.values():
        if plan.verified and plan.measured_error is not None:
            (args, kwargs) = audit.subject.batches[0]
            with torch.no_grad():
                expected = audit.subject.model(*args, **kwargs)
                with patched(audit.subject.model, plan_table(plan)) as model, auditor.imitated("cuda"):
                    got = model(*args, **kwargs)
            error = (got.float() - expected).norm() / expected.norm()
            assert float(error) == pytest.approx(plan.measured_error, rel=1e-3, abs=1e-7)


def test_objectives_save_what_they_name() -> None:
    found = {
        objective: auditor.audit(
            seeded(UNet),
            (normal(1, 3, 16, 16), torch.tensor([17])),
            device="cpu",
            objective=objective,
            formats=("bf16",),
            strategies=("cast",),
        ).plans["cast_bf16"]
        for objective in ("time", "memory", "flops")
    }
    assert all(plan.verified and plan.objective == objective for objective, plan in found.items())
    room = {name: plan.memory.weights + plan.memory.activations for name, plan in found.items() if plan.memory}
    assert room["memory"] <= min(room.values()) * 1.02
    assert found["flops"].low_precision_flops >= 0.98 * max(plan.low_precision_flops for plan in found.values())
    assert found["time"].predicted_speedup >= 0.98 * max(plan.predicted_speedup for plan in found.values())
    assert replace(found["time"], objective="memory") != found["memory"]
