"""Models with habits that make an audit hard: each is captured, planned, verified, and given back as it was."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from auditor import apply
from auditor.records import Audit, NodeReport
from tests.any_model.holding import Call, held
from tests.support.resisting import MODELS

BUDGET = 0.02
CONCRETE = frozenset({"BranchesOnValues", "OverwritesOnItsPath", "PackedGru"})


def built(name: str) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    model, call = MODELS[name]()
    return model.train(name == "NormalisesBatches"), call


@functools.cache
def audited(name: str) -> Audit:
    """The audit of a model, made once, and its promises kept."""
    return held(lambda: built(name), max_error=BUDGET)


@pytest.mark.parametrize("name", MODELS)
def test_plans_say_whether_they_hold_and_operations_are_owned_and_tested(name: str) -> None:
    audit, modules = audited(name), dict(built(name)[0].named_modules(remove_duplicate=False))
    for plan in audit.plans.values():
        assert plan.verification is not None and plan.verification.failure is None, plan.name
        assert plan.verified == (plan.measured_error <= BUDGET), plan.name
    assert len(audit.plans) == 4 and audit.plans[audit.recommended].low_precision_flops > 0
    for report in audit.nodes:
        if report.node.floating:
            assert report.node.owner in modules
            assert report.node.source and report.node.source.startswith("resisting.py:"), report.node
            assert {verdict.verdict for verdict in report.verdicts.values()} <= {"safe", "sensitive", "unsafe"}


def nodes_of(name: str, op: str) -> list[NodeReport]:
    return [report for report in audited(name).nodes if op in report.node.op]


@pytest.mark.parametrize("name", MODELS)
def test_only_models_whose_python_reads_values_are_bound_to_their_path(name: str) -> None:
    concrete = name in CONCRETE
    assert audited(name).capture_method == ("path" if concrete else "run")
    assert any("the path these inputs take" in warning for warning in audited(name).warnings) == concrete


def test_concrete_path_is_the_one_that_ran() -> None:
    owners = {report.node.owner for report in audited("BranchesOnValues").nodes}
    model, ((x,), _) = built("BranchesOnValues")
    taken = "positive" if torch.tanh(model.first(x)).sum() > 0 else "negative"
    assert owners & {"positive", "negative"} == {taken}


def test_shared_block_is_one_scope_and_both_calls_are_measured() -> None:
    linears = nodes_of("TiesAndRepeats", "linear")
    assert [report.node.owner for report in linears] == ["block.1", "block.1", "head"]
    for plan in audited("TiesAndRepeats").plans.values():
        assert not any(path.startswith("again") for path in plan.scopes)


def test_cast_keeps_tied_weights_tied() -> None:
    patched = apply(copy.deepcopy(built("TiesAndRepeats")[0]), audited("TiesAndRepeats"), "cast_fp16")
    assert patched.head.weight is patched.tokens.weight


def test_discrete_outputs_are_compared_by_disagreement() -> None:
    (argmax,) = nodes_of("ReturnsOnlyClasses", "argmax")
    assert all(error.disagreement is not None for error in argmax.errors.values())
    for plan in audited("ReturnsOnlyClasses").plans.values():
        flipped = plan.measured_error * 64
        assert flipped == pytest.approx(round(flipped))


def test_training_mode_is_put_back_and_running_statistics_with_it() -> None:
    model = audited("NormalisesBatches").live.model
    assert model.training and model.norm.num_batches_tracked == 0
    assert not nodes_of("NormalisesBatches", "dropout")
