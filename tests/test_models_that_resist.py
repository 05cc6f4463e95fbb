"""Models with habits that make an audit hard: each is captured, planned, verified, and given back as it was."""

import functools

import pytest
import torch
from torch import nn

from auditor.records import Audit
from tests.any_model.holding import Call, held
from tests.support.resisting import MODELS

BUDGET = 0.02
PATHS = ("overwrites", "packed")
"""Those whose Python reads values."""


def built(name: str) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    model, call = MODELS[name]()
    return model.train(name == "batch norm"), call


@functools.cache
def audited(name: str) -> Audit:
    """The audit of a model, made once, and its promises kept."""
    return held(lambda: built(name), max_error=BUDGET)


@pytest.mark.parametrize("name", MODELS)
def test_plans_say_whether_they_hold_and_operations_are_owned_and_tested(name: str) -> None:
    audit, modules = audited(name), dict(built(name)[0].named_modules(remove_duplicate=False))
    assert audit.capture_method == ("path" if name in PATHS else "run")
    for plan in audit.plans.values():
        assert plan.verification is not None and plan.verification.failure is None, plan.name
        assert plan.is_verified == (plan.measured_error <= BUDGET), plan.name
    assert len(audit.plans) == 4 and audit.plans[audit.recommended].low_precision_flops > 0
    for report in audit.nodes:
        if report.node.floating:
            assert report.node.owner in modules
            assert {verdict.verdict for verdict in report.verdicts.values()} <= {"safe", "sensitive", "unsafe"}


def test_a_shared_block_is_one_scope_and_both_calls_are_measured() -> None:
    linears = [report.node.owner for report in audited("ties").nodes if "linear" in report.node.op]
    assert linears == ["block.1", "block.1", "head"]
    for plan in audited("ties").plans.values():
        assert not any(path.startswith("again") for path in plan.scopes)


def test_training_mode_is_put_back_and_running_statistics_with_it() -> None:
    model = audited("batch norm").live.model
    assert model.training and model[1].num_batches_tracked == 0
    assert not any("dropout" in report.node.op for report in audited("batch norm").nodes)
