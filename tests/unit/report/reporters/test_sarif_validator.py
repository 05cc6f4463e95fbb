"""SARIF as Microsoft's multitool judges it, by the standard's rules and GitHub's; its log counts, not its exit code."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from auditor.report.reporters import sarif
from tests.unit.report.factory import make_audit

INSTALLED = ".ci/tools/node_modules/@microsoft/sarif-multitool-linux/Sarif.Multitool"
ALLOWED = {"SARIF2005"}
"""Warnings let through: SARIF2005 wants the address of a home page, and there is none yet."""


def find_multitool() -> str | None:
    root = Path(__file__).resolve().parents[4]
    names = (os.environ.get("SARIF_MULTITOOL", ""), "Sarif.Multitool", str(root / INSTALLED))
    return next((found for name in names if name and (found := shutil.which(name))), None)


pytestmark = pytest.mark.skipif(find_multitool() is None, reason="no sarif-multitool: .ci/run installs it")


def judged(text: str, folder: Path) -> list[tuple[str, str]]:
    """(rule, level) of everything the validator says about a document."""
    (folder / "f.sarif").write_text(text, encoding="utf-8")
    command = [find_multitool(), "validate", "f.sarif", "--rule-kind", "Sarif;Ghas", "--level", "Error;Warning;Note"]
    environment = {**os.environ, "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"}
    command += ["--output", "out.sarif", "--log", "ForceOverwrite"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    (run,) = json.loads((folder / "out.sarif").read_text(encoding="utf-8-sig"))["runs"]
    return [(found["ruleId"], found.get("level", "warning")) for found in run.get("results", [])]


@pytest.mark.parametrize("options", [{}, {"hostile": True, "synthetic": True}, {"empty": True}], ids=str)
def test_no_error_and_no_warning(options, tmp_path):
    found = judged(sarif(make_audit(60, **options)), tmp_path)
    assert found
    assert [rule for rule, level in found if level == "error"] == []
    assert {rule for rule, level in found if level == "warning"} <= ALLOWED
