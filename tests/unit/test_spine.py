"""The stages of an audit: each runs once, and what it returns reaches the reporters as it was made."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import flow
from auditor.features.quantization import stage as schemes
from auditor.features.training import recommend as training_recommend
from auditor.plan import plans as planning
from auditor.records import Audit, Finding

STAGES = ("run_all_low", "judge", "findings_of", "_recommend", "about")


class Variance(nn.Module):
    """The variance as E[x^2] - E[x]^2, which cancels in FP16 and may be below zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2


class Deviation(nn.Module):
    """Layers that run well in FP16, and a square root that turns NaN if it gets a number below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, variance: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.wide(x / 10))) + torch.sqrt(variance)


class Cancels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.variance, self.deviation = Variance(), Deviation()

    def forward(self, x: Tensor) -> Tensor:
        return self.deviation(x, self.variance(x))


def offset() -> Tensor:
    return 10 + 0.05 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def cancelling() -> Audit:
    torch.manual_seed(0)
    return auditor.audit(Cancels(), offset(), formats=("fp16",), strategies=("cast",))


def test_where_nan_begins_is_unsafe_and_not_the_operation_that_receives_it(cancelling: Audit) -> None:
    first = cancelling.baselines["cast_fp16"].nonfinite
    assert first is not None
    assert (first.op, first.begins_op) == ("aten.sqrt.default", "aten.sub.Tensor")
    verdicts = {report.node.name: report.verdicts["fp16"].verdict for report in cancelling.nodes}
    assert verdicts[first.begins] == "unsafe"
    assert verdicts[first.node] == "safe"


def test_an_operation_that_is_harmless_alone_is_unsafe_where_a_nan_of_the_whole_model_begins() -> None:
    torch.manual_seed(0)
    audit = auditor.audit(Cancels(), offset(), formats=("fp16",), strategies=("cast",), max_error=2.0)
    (report,) = (report for report in audit.nodes if report.node.op == "aten.sub.Tensor")
    assert report.contributions["fp16"].isolated < 2.0
    assert report.verdicts["fp16"].verdict == "unsafe"
    assert report.verdicts["fp16"].reason.startswith(
        "with everything in FP16 with cast weights, cancellation in its result makes the result of sqrt (test_spine.py:"
    )


def test_no_verified_plan_runs_what_is_unsafe_in_low_precision(cancelling: Audit) -> None:
    assert cancelling.recommended == "cast_fp16"
    assert cancelling.plans["cast_fp16"].kept_modules == ("variance",)
    for report in cancelling.nodes:
        assert report.planned is not None
        if report.verdicts["fp16"].verdict == "unsafe":
            assert report.planned.computed == "float32"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_every_stage_runs_once_and_its_record_is_what_the_reporters_get(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, returned = Counter[str](), dict[str, Any]()

    def watch(module: Any, name: str) -> None:
        stage = getattr(module, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            returned[name] = stage(*args, **kwargs)
            return returned[name]

        monkeypatch.setattr(module, name, noted)

    for name in STAGES:
        watch(flow, name)
    watch(flow, "recommend")
    watch(training_recommend, "recommend")
    watch(planning, "find_verified")
    torch.manual_seed(0)
    asked: dict[str, Any] = {}
    if mode == "training":
        asked = {"mode": mode, "loss_fn": lambda outputs, targets: (outputs - targets).square().mean()}
    inputs = (offset(), torch.zeros(64, 64)) if mode == "training" else offset()
    audit = auditor.audit(Cancels(), inputs, **asked)

    assert calls == Counter([*STAGES, "recommend", "find_verified"])
    assert (audit.recommended, audit.recommendation) == returned["_recommend"]
    assert {name: vars(plan) for name, plan in audit.plans.items()} == {
        name: vars(plan) for name, plan in returned["find_verified"].items()
    }
    assert audit.baselines == returned["run_all_low"].runs
    verdicts = {report.node.name: report.verdicts for report in audit.nodes}
    assert verdicts == returned["judge"].verdicts
    assert [unrated(finding) for finding in audit.findings] == [unrated(finding) for finding in returned["findings_of"]]
    assert [*audit.findings] == [*returned["about"]]


def unrated(finding: Finding) -> Finding:
    """A finding without what depends on the plan: its severity, and how the plan treats its operation."""
    return replace(finding, severity="info", plan=None, bearing=None, met={})


def test_plans_of_schemes_reach_the_audit_as_their_stage_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage knows the model as the audit describes it, with its shared modules and tied weights."""
    calls: list[tuple[Any, Any]] = []
    stage = schemes.measure_code

    def noted(plans: Any, measured: Any, *context: Any) -> Any:
        calls.append((measured, stage(plans, measured, *context)))
        return calls[-1][1]

    monkeypatch.setattr(schemes, "measure_code", noted)
    torch.manual_seed(0)
    shared = nn.Linear(64, 64)
    tied = nn.Linear(64, 64)
    tied.weight = shared.weight
    model = nn.Sequential(shared, nn.ReLU(), shared, tied)
    audit = auditor.audit(model, torch.randn(8, 64), formats=("int8",), max_error=0.1, device="cpu")
    ((measured, plans),) = calls
    assert plans == audit.quantized_plans
    assert all(plan.as_pasted for plan in plans)
    assert measured.tied_parameters
    assert measured.shared_modules
    for name in ("quantization", "shared_modules", "tied_parameters", "criteria", "max_error"):
        assert getattr(measured, name) == getattr(audit, name)
