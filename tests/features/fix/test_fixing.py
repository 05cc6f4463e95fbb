"""Whole searches on small models: what is offered was run, gains, and changes no file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from auditor import flow
from auditor.errors import AuditorError
from auditor.features.fix import output
from auditor.features.fix.places import Sources, spots_of
from auditor.features.fix.search import find_fixes
from auditor.loading import load
from auditor.records import Audit
from auditor.report.annotations import sarif
from auditor.report.blocks import to_terminal
from auditor.report.findings import causes
from auditor.report.fixes import fix_words, headline, offer, overview
from auditor.reporters import html
from auditor.settings import Settings
from tests.features.fix.problems import PROBLEMS, Problem

QUICK = Settings(formats=("bf16",), strategies=("cast",))
TWO_RUNS = Settings(formats=("bf16",), strategies=("autocast", "cast"))


def problem(name: str) -> Problem:
    return next(one for one in PROBLEMS if one.name == name)


def audited(folder: Path, name: str, settings: Settings = QUICK) -> tuple[Audit, Path]:
    (folder / ".git").mkdir()  # paths are relative to the repository
    file = problem(name).write(folder)
    return flow.run(load(str(file)), settings), file


def test_a_conversion_in_a_helper_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    audit, _ = audited(tmp_path, "global_scale", TWO_RUNS)
    ops = tmp_path / "global_scale_net" / "layers" / "ops.py"
    before = ops.read_text()
    fixes = find_fixes(audit, TWO_RUNS)
    assert "-    return h * SCALE\n+    return h * SCALE.to(h.dtype)\n" in fixes.patch
    assert "+++ b/global_scale_net/layers/ops.py\n" in fixes.patch
    assert (fixes.failing_before, fixes.failing_after) == (("cast_bf16",), ())
    assert fixes.speedup_after > fixes.speedup_before
    assert [fix.safety for fix in fixes.fixes] == ["safe"]
    assert fixes.audits <= 9
    assert ops.read_text() == before  # nothing is written before it is asked for

    fixed = replace(audit, fixed=fixes)
    (fix,) = fixes.fixes
    assert fix.causes
    assert (fix.run, fix.before) == ("cast_bf16", None)  # which raised; under autocast the source runs as it is
    assert fix_words(fix) in html(fixed)
    assert offer(fixed) == ""
    assert "1 fix:" in headline(fixes)
    results = json.loads(sarif(fixed))["runs"][0]["results"]
    (listed,) = [result["fixes"] for result in results if "fixes" in result]
    (change,) = listed[0]["artifactChanges"]
    assert change["artifactLocation"]["uri"] == "global_scale_net/layers/ops.py"
    assert change["replacements"][0]["insertedContent"]["text"] == ".to(h.dtype)"
    assert json.loads(output.texts_of(fixes)["fixes.json"])["plan_after"] == "autocast_bf16"

    output.apply_fixes(fixes)
    assert ops.read_text() == before.replace("h * SCALE", "h * SCALE.to(h.dtype)")
    with pytest.raises(AuditorError, match="has changed"):
        output.apply_fixes(fixes)


def test_an_audit_without_fixes_has_none_in_its_report(tmp_path: Path) -> None:
    audit, _ = audited(tmp_path, "mask_float")
    assert all(cause.fixes == () for cause in causes(audit).all)
    assert '"fixes"' not in sarif(audit)
    assert "auditor fix" in offer(audit)
    assert f"{audit.repairs[0].speedup:.2f}x" in offer(audit)


def test_a_change_that_only_lowers_the_error_is_refused(tmp_path: Path) -> None:
    """In BF16 the plan holds and is as fast as it can be: FP32 in the source would only make it slower."""
    audit, _ = audited(tmp_path, "tiny_eps")
    fixes = find_fixes(audit, QUICK)
    assert fixes.fixes == ()
    assert fixes.patch == ""
    assert headline(fixes).startswith("No fix")


def test_the_expressions_of_problems_are_the_users(tmp_path: Path) -> None:
    audit, _ = audited(tmp_path, "rms_helper", Settings(formats=("fp16",), strategies=("cast",)))
    spots = spots_of(audit, Sources())
    assert spots
    assert {Path(spot.source.file).name for spot in spots} <= {"ops.py", "model.py"}
    assert "h.square()" in {spot.source.segment(spot.node) for spot in spots}


def test_an_audit_from_files_has_no_model_to_run(tmp_path: Path) -> None:
    audit, _ = audited(tmp_path, "mask_float")
    with pytest.raises(AuditorError, match="loaded from files"):
        find_fixes(replace(audit, live=None), QUICK)


COLUMNS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 4)

    def forward(self, x):
        return self.body((x[:, :1] - x[:, 1:]) / 1000)


def get_model():
    torch.manual_seed(0)
    return Net().eval()


def get_inputs():
    return [torch.tensor([[400000.0, 399000.0], [900000.0, 898000.0], [70000.0, 70500.0]])]
"""


def test_an_input_that_does_not_fit_is_left_with_its_remedy(tmp_path: Path) -> None:
    file = tmp_path / "columns.py"
    file.write_text(COLUMNS)
    settings = Settings(formats=("fp16",), strategies=("cast",))
    fixes = find_fixes(flow.run(load(str(file)), settings), settings)
    assert fixes.fixes == ()
    (left,) = fixes.left
    assert "`x` reaches 9e+05" in left
    assert left.endswith("pass it in FP32, or scale it before the model is called (INP001)")
    assert "pass it in FP32" in " ".join(to_terminal(overview(fixes, "columns")).split())
