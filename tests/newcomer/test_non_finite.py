"""A model that is NaN in FP16 by no operation alone: the operation and its cause are known, and said."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor.report.reporters import text


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
        == f"NaN in FP16 under autocast, though finite if run alone: cancellation at sub ({DIFFERENCE})"
    )
    assert root.errors["fp16"].born


def test_the_reader_is_told_the_operation_the_cause_and_the_rule(audit):
    said = " ".join(text(audit, width=100, color=False).split())
    assert f"sqrt in norm ({ROOT})" in said
    assert f"cancellation at sub in norm ({DIFFERENCE}); see RED004" in said
