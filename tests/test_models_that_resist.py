"""Models with habits that make an audit hard: each is captured, planned, verified, and given back as it was."""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from auditor import apply
from auditor.api import audit as audit_model
from auditor.numerics.metrics import output_error
from auditor.records import NodeReport
from auditor.records.audit import Audit
from tests.support.resisting import MODELS, Call

PLANS = ("autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16")
BUDGET = 0.02
TRAINED = frozenset({"NormalisesBatches"})
CONCRETE = frozenset({"BranchesOnValues", "OverwritesOnItsPath", "PackedGru"})


@dataclass(frozen=True)
class Resisted:
    """A model after its audit, copies of it and of its inputs from before, and the audit."""

    name: str
    model: nn.Module
    call: Call
    before: nn.Module
    call_before: Call
    audit: Audit

    def outputs(self, model: nn.Module) -> list[Tensor]:
        args, kwargs = copy.deepcopy(self.call_before)
        with torch.no_grad():
            return [x for x in pytree.tree_leaves(model.eval()(*args, **kwargs)) if isinstance(x, Tensor)]


@functools.cache
def audited(name: str) -> Resisted:
    """The audit of a model, made once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, call = MODELS[name]()
    model.train(name in TRAINED)
    before, call_before = copy.deepcopy(model), copy.deepcopy(call)
    audit = audit_model(model, call[0], kwargs=call[1], max_error=BUDGET, device="cpu")
    return Resisted(name, model, call, before, call_before, audit)


@pytest.fixture(scope="module", params=MODELS)
def resisted(request: pytest.FixtureRequest) -> Resisted:
    return audited(request.param)


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def test_four_plans_say_whether_they_hold(resisted: Resisted) -> None:
    assert set(resisted.audit.plans) == set(PLANS)
    for plan in resisted.audit.plans.values():
        assert plan.verification is not None, plan.name
        assert plan.verification.failure is None, plan.name
        assert plan.verified == (plan.measured_error <= BUDGET), plan.name
    assert resisted.audit.recommended in PLANS
    assert resisted.audit.plans[resisted.audit.recommended].low_precision_flops > 0


def test_every_floating_operation_is_owned_and_tested(resisted: Resisted) -> None:
    modules = dict(resisted.model.named_modules(remove_duplicate=False))
    for report in resisted.audit.nodes:
        if report.node.floating:
            assert report.node.owner in modules
            assert report.node.source, report.node.name
            assert report.node.source.startswith("resisting.py:"), report.node
            assert {verdict.verdict for verdict in report.verdicts.values()} <= {"safe", "sensitive", "unsafe"}


def test_model_and_inputs_come_back_bit_for_bit(resisted: Resisted) -> None:
    pairs = [
        (dict(resisted.before.state_dict()), dict(resisted.model.state_dict())),
        (dict(resisted.before.named_buffers()), dict(resisted.model.named_buffers())),
    ]
    for before, after in pairs:
        assert list(before) == list(after)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    flags = [(path, module.training) for path, module in resisted.before.named_modules()]
    assert [(path, module.training) for path, module in resisted.model.named_modules()] == flags
    assert all(parameter.grad is None for parameter in resisted.model.parameters())
    for module in resisted.model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    inputs = zip(tensors(resisted.call_before), tensors(resisted.call), strict=True)
    assert all(torch.equal(before, after) for before, after in inputs)
    assert not any(tensor.requires_grad for tensor in tensors(resisted.call))


@pytest.mark.parametrize("name", PLANS)
def test_patched_copy_runs_natively_within_reach_of_the_measurement(resisted: Resisted, name: str) -> None:
    """CPU autocast has lists of its own, so under `autocast` only the budget is asked for."""
    patched = apply(copy.deepcopy(resisted.before), resisted.audit, name)
    assert list(patched.state_dict()) == list(resisted.before.state_dict())
    assert inspect.signature(patched.forward) == inspect.signature(resisted.before.forward)
    reference = resisted.outputs(copy.deepcopy(resisted.before))
    error = output_error(reference, natively(resisted, patched))
    measured = resisted.audit.plans[name].measured_error
    assert error <= (BUDGET if name.startswith("autocast") else 2 * measured + 1e-6)


def natively(resisted: Resisted, patched: nn.Module) -> list[Tensor]:
    try:
        return resisted.outputs(patched)
    except RuntimeError as error:
        if "LSTM forward propagation primitive" not in str(error):
            raise
        pytest.skip("this CPU has no half-precision LSTM")


def nodes_of(name: str, op: str) -> list[NodeReport]:
    return [report for report in audited(name).audit.nodes if op in report.node.op]


def test_only_models_whose_python_reads_values_are_bound_to_their_path(resisted: Resisted) -> None:
    concrete = resisted.name in CONCRETE
    assert resisted.audit.capture_method == ("path" if concrete else "run")
    assert any("the path these inputs take" in warning for warning in resisted.audit.warnings) == concrete


def test_concrete_path_is_the_one_that_ran() -> None:
    owners = {report.node.owner for report in audited("BranchesOnValues").audit.nodes}
    hidden = audited("BranchesOnValues").before
    x = audited("BranchesOnValues").call_before[0][0]
    taken = "positive" if torch.tanh(hidden.first(x)).sum() > 0 else "negative"
    assert owners & {"positive", "negative"} == {taken}


def test_shared_block_is_one_scope_and_both_calls_are_measured() -> None:
    linears = nodes_of("TiesAndRepeats", "linear")
    assert [report.node.owner for report in linears] == ["block.1", "block.1", "head"]
    for plan in audited("TiesAndRepeats").audit.plans.values():
        assert not any(path.startswith("again") for path in plan.scopes)


def test_cast_keeps_tied_weights_tied() -> None:
    for name in ("cast_fp16", "cast_bf16"):
        subject = audited("TiesAndRepeats")
        patched = apply(copy.deepcopy(subject.before), subject.audit, name)
        assert patched.head.weight is patched.tokens.weight


def test_discrete_outputs_are_compared_by_disagreement() -> None:
    subject = audited("ReturnsOnlyClasses")
    (argmax,) = nodes_of("ReturnsOnlyClasses", "argmax")
    assert all(error.disagreement is not None for error in argmax.errors.values())
    for plan in subject.audit.plans.values():
        flipped = plan.measured_error * 64
        assert flipped == pytest.approx(round(flipped))


def test_training_mode_is_put_back_and_running_statistics_with_it() -> None:
    subject = audited("NormalisesBatches")
    assert subject.model.training
    assert subject.model.norm.num_batches_tracked == 0
    assert not nodes_of("NormalisesBatches", "dropout")
