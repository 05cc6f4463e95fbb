"""A constant that FP16 cannot hold: it is named, what follows is measured as low, and no plan writes it there."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records.audit import Audit
from auditor.report.origins import cause
from auditor.report.view import ReportView
from auditor.reporters import text
from tests.support.capturing import Function
from tests.support.replaying import Model

HIDDEN = torch.ones(8, 8).triu(1).bool()
Mask = Callable[[torch.Tensor], torch.Tensor]


def attention(m: Any, x: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Masked attention, and behind it a root mean square by hand that overflows in FP16."""
    scores = mask(m.q(x) @ x.transpose(-1, -2))
    y = 400 * m.n(scores.softmax(-1) @ x)
    return y / y.pow(2).mean(-1, keepdim=True).sqrt()


def full(fill: float) -> Mask:
    return lambda scores: scores + torch.full((8, 8), fill, dtype=scores.dtype).triu(1)  # written here


def in_place(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill_(HIDDEN, -1e9)


def made_low(scores: torch.Tensor) -> torch.Tensor:
    return scores + scores.new_full((8, 8), -1e9).triu(1)


def audited(mask: Mask, formats: str = "fp16") -> Audit:
    torch.manual_seed(0)
    model = Model(partial(attention, mask=mask), q=nn.Linear(16, 16), n=nn.Linear(16, 16))
    return auditor.audit(model, (torch.randn(2, 8, 16),), formats=formats, progress=False)


def unsafe(found: Audit) -> list[str]:
    return [r.node.op for r in found.nodes if r.verdicts["fp16"].verdict == "unsafe"]


@pytest.fixture(scope="module")
def held() -> Audit:
    """The same model with a constant that every format holds."""
    return audited(full(-math.inf))


@pytest.fixture(scope="module")
def found() -> Audit:
    return audited(full(-1e9), "fp16,bf16")


@pytest.mark.parametrize(("mask", "op"), [(in_place, "aten.masked_fill.Scalar"), (made_low, "aten.new_full.default")])
def test_however_it_is_written_it_hides_nothing(mask: Mask, op: str, held: Audit) -> None:
    other = audited(mask)
    assert unsafe(held) == ["aten.pow.Tensor_Scalar", "aten.mean.dim", "aten.sqrt.default"]
    assert unsafe(other) == [op, *unsafe(held)]
    assert [f.op for f in other.findings if f.rule == "CON001"] == [op]


def test_it_hides_nothing_where_it_is_made_in_the_dtype_of_another(found: Audit, held: Audit) -> None:
    assert unsafe(found) == ["aten.full.default", *unsafe(held)]
    assert not any("keeps it in FP32" in report.verdicts["fp16"].reason for report in found.nodes)


def test_it_is_named_with_its_line(found: Audit) -> None:
    (named,) = [finding for finding in found.findings if finding.rule == "CON001"]
    line = full.__code__.co_firstlineno + 1
    assert named.source == f"test_constants.py:{line}"
    assert "-1e+09" in named.message
    assert named.severity == "warning"
    for baseline in (found.baselines["cast_fp16"], found.baselines["autocast_fp16"]):
        assert (
            baseline.failure
            == f"full has the constant -1e+09, outside the range of FP16 (±65504) (test_constants.py:{line})"
        )


def test_every_plan_that_is_predicted_runs(found: Audit) -> None:
    for plan in found.plans.values():
        assert plan.verification.failure is None
        assert plan.is_verified


# What vanishes in FP16 is called underflow, and its reader is sent to BF16, which has the range.


def audited_with(ended: Callable[[Tensor], Tensor], formats: str = "fp16") -> Audit:
    """Of a hidden layer one row of which is zero, so that only an eps keeps what follows finite."""

    def forward(m: Any, x: Tensor) -> Tensor:
        kept = (torch.arange(x.shape[0]) > 0).to(x.dtype)[:, None]
        return m.last(ended(m.first(x).relu() * kept))

    torch.manual_seed(0)
    model, x = Model(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 4)), torch.randn(6, 8)
    return auditor.audit(model, (x,), formats=formats, progress=False)


def flagged(found: Audit, fmt: str = "fp16") -> dict[str, tuple[str | None, str | None]]:
    """{operation: (its cause, what limits it)}, of those that are not safe."""
    return {
        r.node.op.split(".")[1]: (r.errors[fmt].cause, r.verdicts[fmt].limited_by)
        for r in found.nodes
        if r.verdicts[fmt].verdict != "safe"
    }


@pytest.fixture(scope="module")
def logarithm() -> Audit:
    return audited_with(lambda y: (y + 1e-8).log(), "fp16,bf16")


def test_an_eps_that_vanishes_under_a_logarithm(logarithm: Audit) -> None:
    assert flagged(logarithm) == {"add": ("underflow", "range"), "log": ("underflow", "range")}
    reasons = {r.node.op.split(".")[1]: r.verdicts["fp16"].reason for r in logarithm.nodes}
    expected = "an input that is not zero in FP32 is zero in FP16 (underflow); the outputs turn Inf or NaN"
    assert reasons["log"] == expected
    assert reasons["add"].count("(underflow)") == 1


def test_the_reader_is_sent_to_bf16(logarithm: Audit) -> None:
    fp16, bf16 = (tally.sentence for tally in ReportView(logarithm).tallies)
    assert fp16.endswith("causes: underflow (BF16 has FP32's range).")
    assert "underflow" not in bf16
    assert "overflow" not in " ".join((fp16, bf16))
    (eps,) = [finding for finding in logarithm.findings if finding.rule == "CON002"]
    assert eps.advice.startswith("Run the model in BF16")
    assert not any("overflow" in r.verdicts["fp16"].reason for r in logarithm.nodes)


def test_an_eps_that_vanishes_under_a_quotient() -> None:
    found = audited_with(lambda y: y / (y.norm(dim=-1, keepdim=True) + 1e-8))  # 0 / 0 is NaN
    assert flagged(found) == dict.fromkeys(("add", "div"), ("underflow", "range"))


# A model that is NaN in FP16 by no operation alone: the operation and its cause are known, and said.


def norm(y):
    """A layer norm written by hand: E[x^2] - E[x]^2 turns negative where both are rounded, and its root NaN."""
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
    model = nn.Sequential(OrderedDict(stem=nn.Linear(16, 16, bias=False), norm=Function(norm), head=nn.Linear(16, 8)))
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
    assert "see RED004" in cause(audit, first, "fp16")


def test_where_it_begins_is_unsafe_and_the_operation_that_receives_it_is_not(audit):
    verdicts = {node.node.op: node.verdicts["fp16"] for node in audit.nodes}
    assert verdicts["aten.sub.Tensor"].verdict == "unsafe"
    assert verdicts["aten.sqrt.default"].verdict == "safe"
    (root,) = (node for node in audit.nodes if node.node.op == "aten.sqrt.default")
    assert root.errors["fp16"].originates_here


def test_the_reader_is_told_the_operation_the_cause_and_the_rule(audit):
    said = " ".join(text(audit, width=100, color=False).split())
    assert f"sqrt in norm ({ROOT})" in said
    assert f"cancellation at sub in norm ({DIFFERENCE}); see RED004" in said
