"""What only the flow as a whole decides: which record goes into which stage."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from auditor.flow import TOO_SMALL, run
from auditor.numerics.metrics import output_error
from auditor.records import Audit, Subject
from auditor.records.measure import Ignore
from auditor.resources import resource_dir
from auditor.rulebook.load import load_rules
from auditor.settings import Settings
from auditor.stages import Stages
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded, subject_of

RULES = tuple(load_rules([resource_dir("rules")]))


def net() -> nn.Module:
    return Model(
        lambda m, x: torch.softmax(m.last(m.norm(m.first(x))), -1),
        first=nn.Linear(8, 16),
        norm=nn.LayerNorm(16),
        last=nn.Linear(16, 4),
    )


def audited(model: nn.Module, held_out: bool = False, **asked: Any) -> Audit:
    subject = subject_of(model, normal(4, 8))
    subject = replace(subject, held_out=(((normal(4, 8, seed=1),), {}),)) if held_out else subject
    options = Settings(
        rulebook=RULES, command="test", formats=("bf16",), strategies=("autocast",), device="cpu", **asked
    )
    return run(subject, options)


def thousandths(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
    return 1000 * output_error(reference, candidate)


def test_regions_are_told_in_the_outputs_own_error_whatever_the_metric() -> None:
    model = Function(lambda x: (x / 3.0 - x / 3.0) + x * 0.25)
    (plain,) = audited(model, max_error=1e-4).regions
    (scaled,) = audited(model, max_error=1e-1, metric=thousandths).regions
    assert plain.explained > 1e-3
    assert (scaled.nodes, scaled.error) == (plain.nodes, plain.error)
    assert scaled.explained == pytest.approx(plain.explained, rel=1e-6)


def test_only_findings_that_are_wanted_are_reported() -> None:
    every = {finding.rule for finding in audited(seeded(net)).findings}
    assert {"BND001", "BND002", "SFT001"} <= every
    boundary = audited(seeded(net), select=("BND",))
    assert {finding.rule for finding in boundary.findings} == {rule for rule in every if rule.startswith("BND")}
    ignored = audited(seeded(net), ignore=(Ignore("SFT"),))
    assert {finding.rule for finding in ignored.findings} == {rule for rule in every if not rule.startswith("SFT")}


@pytest.mark.parametrize("held_out", [False, True])
def test_plans_that_were_checked_on_what_they_were_made_from_say_so(held_out: bool) -> None:
    audit = audited(seeded(net), held_out=held_out)
    said = any("verified on the calibration inputs" in warning for warning in audit.warnings)
    verification = audit.plans["autocast_bf16"].verification
    assert (said, verification.inputs) == ((False, "held-out") if held_out else (True, "audited"))


def test_findings_are_about_the_audited_formats_and_training_where_that_is_asked_for() -> None:
    def risky(x: torch.Tensor) -> torch.Tensor:
        length = (x.pow(2).sum(-1, keepdim=True) + 1e-12).sqrt()
        return (x / length).clamp(max=1 - 1e-6).cumsum(-1).log_softmax(-1)

    found = audited(Function(risky)).findings
    assert {"CON003", "SFT001"} <= {item.rule for item in found}
    assert all(item.formats == ("bf16",) and "FP16" not in item.message for item in found)
    assert not [item.rule for item in found if item.rule.startswith("TRN")]


def test_signs_of_life_come_from_inside_of_every_stage_that_runs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal or a watching process hears while one stage takes minutes."""
    heard: Counter[str] = Counter()
    monkeypatch.setattr("auditor.stages.QUIET", 0.0)
    steep = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4))
    with torch.no_grad():
        steep[0].weight.mul_(3000.0)
    batch = (normal(4, 8), normal(4, 4, seed=1))
    asked = {"mode": "training", "loss_fn": nn.functional.mse_loss, "strategies": ("autocast",)}
    asked["progress"] = lambda stage, *rest: heard.update([stage])
    auditor.audit(steep, batch, max_error=1e-4, **asked)  # a budget that plans have to be searched for
    assert {"measure", "training", "baseline", "plan", "low steps"} <= {
        s for s in heard if heard[s] > 2
    }  # nothing flagged lies together here


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

Begun = Callable[[Exception, str], Audit]


@pytest.fixture
def ran() -> list[str]:
    """Where audits were begun."""
    return []


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, ran: list[str]) -> Begun:
    """Begins an audit by an error and a device, where there is a GPU on which the stage `measure` ends with the error."""
    audit = audited(seeded(net))
    names = {"is_available": True, "current_device": 0, "device_count": 1, "empty_cache": None}
    device = SimpleNamespace(**{name: partial(lambda answer: answer, answer) for name, answer in names.items()})
    device.get_device_name = lambda device: "A GPU"
    monkeypatch.setattr("auditor.devices._module", lambda kind: device)

    def begin(error: Exception, device: str) -> Audit:
        def audited_there(subject: Subject, options: Settings) -> Audit:
            ran.append(options.where)
            if options.native:
                with Stages(None)("measure", ""):
                    raise error
            return audit

        monkeypatch.setattr("auditor.flow._audit", audited_there)
        return run(audit.subject, Settings(command="", device=device))

    return begin


@pytest.mark.parametrize("error", [FULL, RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")])
def test_a_gpu_that_is_too_small_is_left_for_the_cpu(begun: Begun, ran: list[str], error: Exception) -> None:
    assert begun(error, "auto").warnings[-1] == TOO_SMALL
    assert ran == ["cuda:0", "cpu"]


@pytest.mark.parametrize(
    "error", [MemoryError("host"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), ValueError()]
)
def test_other_errors_are_not_about_the_gpu(begun: Begun, ran: list[str], error: Exception) -> None:
    with pytest.raises((AuditorError, ValueError)):
        begun(error, "auto")
    assert ran == ["cuda:0"]
