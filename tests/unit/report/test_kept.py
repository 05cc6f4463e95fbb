"""What a plan keeps in FP32: modules of one shape together, which they are, and why."""

from __future__ import annotations

import itertools
from dataclasses import replace

from auditor.records import Reason, ScopeChoice
from auditor.report.kept import Island, islands
from auditor.report.reporters import text
from tests.unit.report.factory import make_audit

SCATTERED = tuple(f"couplings.{i}.net.{j}" for i, j in itertools.product(range(5), (0, 2, 4)) if (i + j) % 3)


def keeping(*paths, because=("BND002",)):
    """An audit whose recommended plan keeps these modules, for one reason."""
    audit = make_audit(60)
    plan = audit.plans["autocast_fp16"]
    scopes = {"": ScopeChoice("fp16"), **{path: ScopeChoice("fp32", because) for path in paths}}
    kept = replace(plan, scopes=scopes, reasons=(Reason("no-gain", "lowering it saves no time", paths),))
    return replace(audit, plans={**audit.plans, "autocast_fp16": kept})


def test_the_clause_comes_before_the_rules():
    (found,) = islands(keeping("head").plans["autocast_fp16"])
    assert found.why == "lowering it saves no time (BND002)"
    assert Island(("a",), ("NRM001", "SFT001")).why == "NRM001, SFT001"
    assert Island(("a",), ()).why == ""


def test_modules_of_one_shape_have_one_name():
    (found,) = islands(keeping(*SCATTERED).plans["autocast_fp16"])
    assert found.name == f"couplings.*.net.* x{len(SCATTERED)}"


def test_functions_of_the_root_stay_in_the_whole_model_and_a_terminal_names_all_of_them():
    functions = ("add", "linalg_inv", "matmul", "mean", "rsqrt")
    audit = make_audit(60)
    plan = audit.plans["autocast_fp16"]
    kept = replace(plan, scopes={"": ScopeChoice("fp16", ("a reason " * 12,), keep=functions)}, reasons=())
    (found,) = islands(kept)
    assert found.name == f"{', '.join(functions)} in the whole model"
    audit = replace(audit, plans={**audit.plans, "autocast_fp16": kept}, findings=())
    said = text(audit, width=80, color=False)
    assert found.name in " ".join(said.split())
