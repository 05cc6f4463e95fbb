"""Public architectures, unchanged: captured whole, judged in the user's names, planned, verified, patched, left as they were."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from auditor import apply
from auditor.api import audit as audit_model
from auditor.numerics.metrics import output_error
from auditor.records.audit import Audit
from tests.architectures.zoo import ZOO, Specimen, specimen
from tests.support.subjects import DTYPES

ALIKE = ("mobilenet_v3", "whisper", "gpt2", "llama")
"""Of layers each of a kind that others here have."""


@dataclass(frozen=True)
class Audited:
    """A specimen, its audit, and a copy of the model made before it."""

    name: str
    specimen: Specimen
    audit: Audit
    before: nn.Module

    @property
    def model(self) -> nn.Module:
        return self.specimen.model

    def fresh(self) -> nn.Module:
        """A copy that no plan has touched."""
        return copy.deepcopy(self.before)

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """What a model of this architecture answers to the audited inputs, on this machine's own kernels."""
        return self.specimen.outputs(model)


SLOW = {"deberta_v2", "t5", "mamba", "mixtral"}
PARAMS = [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ZOO if n not in ALIKE]


@pytest.fixture(scope="module", params=PARAMS)
def audited(request: pytest.FixtureRequest) -> Audited:
    subject = specimen(request.param)
    before = copy.deepcopy(subject.model)
    audit = audit_model(subject.model, subject.args, kwargs=subject.kwargs, device="cpu")
    return Audited(request.param, subject, audit, before)


# Public architectures, unchanged: captured whole, judged in the user's names, planned, verified, left as they were.

PLANS = ("autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16")

READ_VALUES = {"bert"}
"""Those whose library looks at an attention mask that it is given, to leave one out that hides nothing."""


def test_the_path_depends_on_values_only_where_python_reads_them(audited: Audited) -> None:
    assert audited.audit.capture_method == ("path" if audited.name in READ_VALUES else "run")
    said = any("depends on the values" in warning for warning in audited.audit.warnings)
    assert said == (audited.name in READ_VALUES)


def test_every_floating_operation_has_an_owner_and_a_source_line(audited: Audited) -> None:
    modules = dict(audited.model.named_modules())
    nodes = [report.node for report in audited.audit.nodes if report.node.floating]
    assert len(nodes) > 20
    assert [node.name for node in nodes if node.owner not in modules] == []
    assert [node.name for node in nodes if not node.source] == []
    assert all(type(modules[node.owner]).__name__ == node.owner_type for node in nodes)
    own = [node for node in nodes if node.owner]
    assert len(own) > len(nodes) / 2  # most operations belong to a layer, not to the model as a whole


def test_every_floating_operation_is_tested(audited: Audited) -> None:
    untested = {
        report.node.name: verdict.reason
        for report in audited.audit.nodes
        for verdict in report.verdicts.values()
        if report.node.floating and verdict.verdict == "untested"
    }
    assert untested == {}


def test_recommended_plan_holds_the_budget_and_lowers_something(audited: Audited) -> None:
    audit = audited.audit
    assert audit.recommended in PLANS
    chosen = audit.plans[audit.recommended]
    assert chosen.is_verified
    assert chosen.measured_error <= audit.max_error
    assert chosen.low_precision_flops > 0.5


def test_nothing_stays_fp32_where_plain_low_precision_holds(audited: Audited) -> None:
    """Random weights of ordinary size: where the whole model run low is well inside the budget, so is its plan.

    Products that autocast itself leaves alone, as Mixtral's grouped ones, are FP32 in a scope that is low.
    """
    for name, baseline in audited.audit.baselines.items():
        if baseline.measured_error is not None and baseline.measured_error < audited.audit.max_error / 2:
            plan = audited.audit.plans[name]
            low = {choice.precision for choice in plan.scopes.values()} == {plan.format}
            assert low or plan.low_precision_flops == pytest.approx(1.0), name


def test_a_near_miss_is_repaired_by_islands_not_by_giving_up(audited: Audited) -> None:
    """Where the whole model run low is at most three budgets off, some scopes stay FP32, not all of them."""
    for name, baseline in audited.audit.baselines.items():
        if baseline.measured_error is not None and baseline.measured_error < 3 * audited.audit.max_error:
            assert audited.audit.plans[name].low_precision_flops > 0.2, name


def test_prediction_is_near_the_measurement(audited: Audited) -> None:
    for plan in audited.audit.plans.values():
        if plan.low_precision_flops > 0.5:
            assert plan.predicted_error / 8 < plan.measured_error < 8 * plan.predicted_error, plan.name


def test_no_plan_is_further_off_than_the_model_without_one(audited: Audited) -> None:
    for name, plan in audited.audit.plans.items():
        baseline = audited.audit.baselines[name]
        if baseline.measured_error is not None:
            assert plan.measured_error <= baseline.measured_error, name


# What a plan does to a public architecture: everything but precision stays, and the model runs on plain torch.

STRATEGIES = ("autocast", "cast")


def test_patched_copy_runs_natively_with_the_error_that_was_measured(audited: Audited) -> None:
    """CPU kernels and CPU autocast lists differ a little from CUDA's, hence the room."""
    reference = audited.outputs(audited.before)
    for name, plan in audited.audit.plans.items():
        error = output_error(reference, audited.outputs(apply(audited.fresh(), audited.audit, name)))
        assert error <= 2 * plan.measured_error + 1e-6, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_baseline_is_what_torch_does_without_a_plan(audited: Audited, strategy: str) -> None:
    reference = audited.outputs(audited.before)
    for name, dtype in DTYPES.items():
        baseline = audited.audit.baselines[f"{strategy}_{name}"]
        error = output_error(reference, plainly_low(audited, strategy, dtype))
        assert math.isfinite(error)
        assert baseline.failure is None
        assert error / 2 < baseline.measured_error < 2 * error


def plainly_low(audited: Audited, strategy: str, dtype: torch.dtype) -> list[torch.Tensor]:
    if strategy == "autocast":
        with torch.autocast("cpu", dtype=dtype):
            return audited.outputs(audited.fresh())
    return audited.specimen.lowered(dtype).outputs(audited.fresh().to(dtype))
