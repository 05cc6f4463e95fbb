"""A format that nobody has, 1-6-9, is registered here alone, and a small model is audited in it from end to end."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import PlanError
from auditor.numerics.formats import FORMATS
from auditor.records import NodeReport
from auditor.records.audit import Audit
from auditor.report import model_explorer
from auditor.reporters import REPORTERS
from tests.support.capturing import Function
from tests.support.formats import ieee_format, temporary_format
from tests.support.refusing import refused
from tests.support.replaying import Model

E6M9 = ieee_format("e6m9", exponent_bits=6, mantissa=9)
X = torch.tensor([[1 + j / 512 for j in range(4)]])  # on the grid: spacing 2^-9 in [1, 2)


def far(scale: float) -> nn.Module:
    """1 / x by a detour over x^2 * scale^2."""
    return Function(lambda x: (y := x * scale, (y * y).rsqrt() * scale)[1])


def small() -> nn.Module:
    """A product, and two detours: one leaves FP16's range alone (2^20), the other that of 1-6-9 too (2^34)."""
    parts = {"near": Function(lambda x: x * x), "far": far(2.0**10), "beyond": far(2.0**17)}
    last = nn.Linear(4, 4, bias=False)
    nn.init.eye_(last.weight)
    return Model(lambda m, x: m.last(m.near(x)) + m.far(x) + m.beyond(x), last=last, **parts).eval()


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    with temporary_format(E6M9):
        yield


@pytest.fixture(scope="module")
def audit(known: None) -> Audit:
    return auditor.audit(small(), X, formats=("fp16", "e6m9"), max_error=0.02)


def node(audit: Audit, owner: str, op: str, index: int = 0) -> NodeReport:
    return [r for r in audit.nodes if r.node.owner == owner and r.node.op == op][index]


def test_the_error_of_a_product_is_that_of_rounding_it_by_hand(audit: Audit) -> None:
    error = node(audit, "near", "aten.mul.Tensor").errors["e6m9"]
    # (1 + j/512)^2 = 1 + 2j/512 + j^2/2^18, of which the last term is less than half a spacing: it is what is lost.
    lost = math.sqrt(sum(j**4 for j in range(4))) / 2**18
    assert error.local_error == pytest.approx(lost / math.sqrt(sum((1 + j / 512) ** 4 for j in range(4))), rel=1e-5)
    assert error.local_error <= 2.0**-10
    assert error.max_ulp == pytest.approx(9 / 512)  # 9/2^18 of a spacing of 2^-9
    assert (error.overflow, error.underflow, error.cause) == (0, 0.0, "rounding")


def test_verdicts_and_plans_are_those_of_its_range(audit: Audit) -> None:
    owners = ("near", "far", "beyond")
    found = {owner: node(audit, owner, "aten.mul.Tensor", owner != "near").verdicts for owner in owners}
    said = {owner: (one["fp16"].verdict, one["e6m9"].verdict) for owner, one in found.items()}
    assert said == {"near": ("safe", "safe"), "far": ("unsafe", "safe"), "beyond": ("unsafe", "unsafe")}
    assert found["beyond"]["e6m9"].reason.startswith("1.738e+10 overflows (the largest number is 4.2")
    for name, expected in (("cast_e6m9", ["e6m9", "e6m9", "fp32"]), ("cast_fp16", ["fp16", "fp32", "fp32"])):
        scopes = audit.plans[name].scopes
        assert [scopes.get(owner, scopes[""]).precision for owner in owners] == expected


def test_its_plan_is_predicted_and_simulated_and_not_run(audit: Audit) -> None:
    plan, baseline = audit.plans["cast_e6m9"], audit.baselines["cast_e6m9"]
    assert 0 < plan.predicted_error < 0.002
    assert (plan.measured_error, plan.is_verified) == (None, False)
    said, _, error = plan.verification.failure.rpartition(" ")
    assert said == (
        "torch has no arithmetic in E6M9, so the plan cannot be run; replaying the recorded graph with every value "
        "rounded gives an error of"
    )
    assert float(error) == pytest.approx(plan.predicted_error, rel=1.0)
    assert plan.note == "the A100 has no E6M9 arithmetic: a speed-up only comes from moving fewer bytes"
    # rsqrt(inf) = 0: of x^2 + 2 / x, which is 3 at x = 1, a third is missing.
    assert baseline.measured_error == pytest.approx(1 / 3, abs=0.01)
    assert (baseline.finite, baseline.failure) == (True, None)


def test_every_reporter_takes_it_and_the_page_says_that_its_plans_are_not_run(audit: Audit) -> None:
    for name, report in REPORTERS.items():
        assert name in ("sarif", "github") or "e6m9" in report(audit).lower()
    page = REPORTERS["html"](audit)
    assert (
        "torch cannot compute in E6M9: results were rounded to the format, and plans in the format were not run."
        in page
    )
    assert ">not run<" in page and "E6M9" in audit._repr_html_()
    assert any("e6m9" in file for file in model_explorer.files(audit))


def test_its_plans_are_neither_written_as_a_model_nor_applied_and_the_others_are(audit: Audit, tmp_path: Path) -> None:
    audit.save(tmp_path)
    text = (tmp_path / "patched_model.py").read_text(encoding="utf-8")
    assert "# cast_e6m9: torch has no arithmetic in E6M9, so this plan cannot be run.\n" in text
    written: dict[str, Any] = {"__name__": "patched_model", "__file__": str(tmp_path / "patched_model.py")}
    exec(compile(text, "patched_model.py", "exec"), written)
    assert set(written["PLANS"]) == {"autocast_fp16", "cast_fp16"}
    with pytest.raises(ValueError, match="no plan 'cast_e6m9': "):
        written["apply"](small(), "cast_e6m9")
    for plan in (audit, tmp_path / "plan.json"):
        with refused(PlanError, "no-arithmetic", match="torch cannot compute in E6M9, so the plan cannot be run"):
            auditor.apply(small(), plan, name="cast_e6m9")
    with pytest.raises(PlanError, match="no code can run 'cast_e6m9'"):
        auditor.snippet(audit, "fsdp2", "cast_e6m9")
    unknown = (tmp_path / "plan.json").read_text(encoding="utf-8").replace("e6m9", "e7m8")
    (tmp_path / "plan.json").write_text(unknown, encoding="utf-8")
    with refused(PlanError, "bad-plan", match="e7m8"):
        auditor.apply(small(), tmp_path / "plan.json", name="cast_fp16")


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_is_audited_by_rounding_too(fmt: str) -> None:
    audit = auditor.audit(small(), X, formats=(fmt,), strategies=("cast",), max_error=0.3)
    # Of 1 to 1.006 nothing but 1 is left: j/512 is less than half of 1/8 and of 1/4, and so is the product's 2j/512.
    error = node(audit, "near", "aten.mul.Tensor").errors[fmt].local_error
    squares = [(1 + j / 512) ** 2 for j in range(4)]
    assert error == pytest.approx(math.hypot(*(s - 1 for s in squares)) / math.hypot(*squares), rel=1e-5)
    assert node(audit, "far", "aten.mul.Tensor", 1).verdicts[fmt].verdict == "unsafe"  # 2^20 is beyond 448 and 57344
    assert audit.plans[f"cast_{fmt}"].scopes["far"].precision == "fp32"
    said = (
        f"No plan is recommended: torch has no arithmetic in {FORMATS[fmt].label}, so no plan can be run or verified."
    )
    assert audit.recommendation == said
    assert said in REPORTERS["html"](audit)
