"""A model that is NaN in FP16 by no operation alone: the operation and its cause are known, and said."""

import copy
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor.report.findings import causes
from auditor.report.reporters import text
from tests.support.replaying import Model


class Norm(nn.Module):
    """A layer norm written by hand: E[x^2] - E[x]^2 turns negative where both are rounded, and its root NaN."""

    def forward(self, y):
        mean = y.mean(-1, keepdim=True)
        var = (y * y).mean(-1, keepdim=True) - mean * mean
        return (y - mean) / torch.sqrt(var + 1e-8)


LINES = Path(__file__).read_text().splitlines()
DIFFERENCE = f"{Path(__file__).name}:{1 + next(i for i, line in enumerate(LINES) if 'mean * mean' in line)}"
ROOT = f"{Path(__file__).name}:{1 + next(i for i, line in enumerate(LINES) if 'torch.sqrt(' in line)}"


@pytest.fixture(scope="module")
def audit():
    torch.manual_seed(0)
    rows = 37.8671875 + torch.tensor([1.234375, -1.234375] * 8).repeat(4, 1)
    model = nn.Sequential(OrderedDict(stem=nn.Linear(16, 16, bias=False), norm=Norm(), head=nn.Linear(16, 8)))
    nn.init.eye_(model.stem.weight)
    return auditor.audit(model, rows, formats=("fp16",))


def test_alone_no_operation_makes_it(audit):
    assert {error.nan + error.overflow for node in audit.nodes for error in node.errors.values()} == {0}


@pytest.mark.parametrize("name", ["autocast_fp16", "cast_fp16"])
def test_the_run_is_nan_and_its_first_operation_is_known(audit, name):
    base = audit.baselines[name]
    assert not base.finite
    first = base.nonfinite
    assert (first.op, first.value, first.source) == ("aten.sqrt.default", "NaN", ROOT)
    assert (first.cause, first.begins_op, first.begins_source) == ("cancellation", "aten.sub.Tensor", DIFFERENCE)
    assert first.rules == ("RED004",)


def test_the_operation_is_unsafe_in_that_run(audit):
    (root,) = (node for node in audit.nodes if node.node.op == "aten.sqrt.default")
    assert root.verdicts["fp16"].verdict == "unsafe"
    assert (
        root.verdicts["fp16"].reason
        == f"NaN in FP16 under autocast, though not alone: cancellation at sub ({DIFFERENCE})"
    )
    assert root.errors["fp16"].born


def test_the_reader_is_told_the_operation_the_cause_and_the_rule(audit):
    said = " ".join(text(audit, width=100, color=False).split())
    assert f"sqrt in norm ({ROOT})" in said
    assert f"cancellation at sub in norm ({DIFFERENCE}); see RED004" in said


# The code that keeps one module in FP32, run as pasted from the report of the strategy that it recommends.


@pytest.fixture(scope="module", params=["cast", "autocast"])
def audited(request):
    torch.manual_seed(0)
    stem, head, weight = nn.Linear(16, 16), nn.Linear(16, 8), nn.Parameter(torch.linspace(0.5, 1.5, 16))
    norm = Model(lambda m, x: x / (x * x).sum(-1, keepdim=True).sqrt() * m.weight, weight=weight)
    model = Model(lambda m, x: m.head(m.norm(m.stem(x) * 300.0)), stem=stem, norm=norm, head=head).eval()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))  # 16 * 300^2 is beyond FP16
    audit = auditor.audit(model, x, formats=("fp16",), strategies=(request.param,))
    assert audit.recommended == f"{request.param}_fp16"
    return audit, model, x


def test_the_code_of_each_cause_is_for_the_recommended_strategy_and_runs(audited):
    audit, model, x = audited
    (code,) = {cause.snippet for cause in causes(audit).wanting}
    space = {"model": copy.deepcopy(model)}
    exec(code, space)
    with torch.no_grad(), auditor.emulate("cuda"):
        found = space["model"](x)
    with torch.no_grad():
        truth = model(x)
    assert found.dtype is torch.float16
    assert float((found - truth).norm() / truth.norm()) <= audit.max_error
