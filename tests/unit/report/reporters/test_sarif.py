import importlib
import inspect
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit, Finding
from auditor.report.annotations import place_of
from auditor.report.findings import causes
from auditor.report.model_explorer import graph
from auditor.report.table import table
from auditor.reporters import html, markdown, sarif, text
from tests.unit.report.factory import make_audit


def run(audit):
    document = json.loads(sarif(audit))
    assert document["version"] == "2.1.0"
    assert document["$schema"]
    return document["runs"][0]


def test_a_rule_keeps_the_severity_of_its_file_where_the_measurement_refutes_a_finding():
    audit = make_audit(60)
    cited = ("Someone, A paper, 2020: https://example.org/paper",)
    refuted = [replace(f, severity="info", declared="error", agrees=False, references=cited) for f in audit.findings]
    found = run(replace(audit, findings=tuple(refuted)))
    rules = found["tool"]["driver"]["rules"]
    assert {rule["defaultConfiguration"]["level"] for rule in rules} == {"error"}
    assert {rule["helpUri"] for rule in rules} == {"https://example.org/paper"}
    assert all(cited[0] in rule["help"]["markdown"] for rule in rules)
    assert {result["level"] for result in found["results"]} == {"note"}


def fingerprints(audit):
    return [r["partialFingerprints"]["primaryLocationLineHash"] for r in run(audit)["results"]]


def test_fingerprints_are_distinct_and_survive_new_numbers_lines_and_blocks():
    audit = make_audit(60)
    before = fingerprints(audit)
    assert len(set(before)) == len(before)
    moved = tuple(
        replace(f, message="other 3.14", evidence={}, source=f"model.py:{500 + int(f.source.split(':')[1])}")
        for f in audit.findings
    )
    assert sorted(fingerprints(replace(audit, findings=moved))) == sorted(before)
    deeper = make_audit(60 + 14 * 3)
    assert set(before) & set(fingerprints(deeper)) >= {
        f for f, r in zip(before, run(audit)["results"], strict=True) if r["ruleId"] == "SFT001"
    }


def test_a_finding_over_many_blocks_is_one_result():
    softmax = [r for r in run(make_audit())["results"] if r["ruleId"] == "SFT001"]
    assert len(softmax) == 1
    assert softmax[0]["occurrenceCount"] == 8
    assert len(softmax[0]["locations"][0]["logicalLocations"]) == 8


def test_files_are_named_from_their_repository(tmp_path):
    (tmp_path / ".git").mkdir()
    source = tmp_path / "src" / "my model.py"
    audit = make_audit(20)
    nodes = tuple(replace(r, node=replace(r.node, source_path=str(source))) for r in audit.nodes)
    audit = replace(audit, nodes=nodes)
    assert {place_of(audit, cause).file for cause in causes(audit).all} == {"src/my model.py"}
    first = run(audit)["results"][0]
    assert first["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "src/my%20model.py"


def test_findings_in_installed_packages_point_at_the_audited_file(tmp_path):
    (tmp_path / ".git").mkdir()
    library = tmp_path / "lib" / "site-packages" / "timm" / "vit.py"
    audit = make_audit(20)
    subject = replace(audit.subject, file=str(tmp_path / "audit_me.py"))
    nodes = tuple(replace(r, node=replace(r.node, source_path=str(library))) for r in audit.nodes)
    moved = replace(audit, nodes=nodes, subject=subject)
    assert {(p.file, p.line) for p in (place_of(moved, cause) for cause in causes(moved).all)} == {("audit_me.py", 1)}
    region = run(moved)["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert "snippet" not in region
    assert "snippet" in run(audit)["results"][0]["locations"][0]["physicalLocation"]["region"]


# A helper's line, and the forward that called it, in everything that an audit of it says.


HELPERS = """\
def scale(x):
    return x.square().mean(-1, keepdim=True)


def unit(x):
    return x / (scale(x) + 1e-16).sqrt()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> tuple[Audit, Finding, str]:
    """An audit, its finding about the helper's 1e-16, and what should stand beside that line."""
    folder = tmp_path_factory.mktemp("helpers")
    (folder / "unit_helpers.py").write_text(HELPERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        helpers = importlib.import_module("unit_helpers")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return helpers.unit(self.layer(x))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).index_fill(0, torch.tensor(0), 0.0)
    audit = auditor.audit(Net(), x)
    line = inspect.getsourcelines(Net.forward)[1] + 1
    finding = next(f for f in audit.findings if f.source == "unit_helpers.py:6")
    return audit, finding, f"{Path(__file__).name}:{line} in Net.forward"


def test_every_reporter_shows_both(found: tuple[Audit, Finding, str]) -> None:
    audit, _, beside = found
    both = f"unit_helpers.py:6 (from {beside})"
    for rendered in (text(audit), html(audit), audit._repr_html_(), sarif(audit)):
        assert both in " ".join(rendered.split())  # a terminal breaks lines
    assert both.replace("_", "\\_") in markdown(audit) or both in markdown(audit)
    assert both in table(audit)["strings"]
    assert both in json.dumps(graph(audit))


def test_code_scanning_gets_the_helpers_line_and_a_link_to_the_call(found: tuple[Audit, Finding, str]) -> None:
    audit, _, beside = found
    results = json.loads(sarif(audit))["runs"][0]["results"]
    result = next(r for r in results if r["locations"][0]["physicalLocation"]["region"]["startLine"] == 6)
    (related,) = result["relatedLocations"]
    assert related["physicalLocation"]["artifactLocation"]["uri"].endswith(Path(__file__).name)
    assert related["physicalLocation"]["region"]["startLine"] == int(beside.partition(" in ")[0].rpartition(":")[2])
    assert related["message"]["text"] == "called from Net.forward"


def test_a_finding_in_an_installed_package_lies_where_that_is_called(found: tuple[Audit, Finding, str]) -> None:
    """What is installed is in no repository; the call is."""
    audit, finding, beside = found
    inside = "/env/lib/python3/site-packages/unit_helpers.py"
    nodes = tuple(replace(r, node=replace(r.node, source_path=inside)) for r in audit.nodes)
    line = int(beside.partition(" in ")[0].rpartition(":")[2])
    audit = replace(audit, nodes=nodes)
    place = next(place_of(audit, cause) for cause in causes(audit).all if finding in cause.members)
    assert (Path(place.file).name, place.line) == (Path(__file__).name, line)


# SARIF as Microsoft's multitool judges it, by the standard's rules and GitHub's; its log counts, not its exit code.


INSTALLED = ".ci/tools/node_modules/@microsoft/sarif-multitool-linux/Sarif.Multitool"
ALLOWED = {"SARIF2005"}
"""Warnings let through: SARIF2005 wants the address of a home page, and there is none yet."""


def find_multitool() -> str | None:
    root = Path(__file__).resolve().parents[4]
    names = (os.environ.get("SARIF_MULTITOOL", ""), "Sarif.Multitool", str(root / INSTALLED))
    return next((found for name in names if name and (found := shutil.which(name))), None)


def judged(text: str, folder: Path) -> list[tuple[str, str]]:
    """(rule, level) of everything the validator says about a document."""
    (folder / "f.sarif").write_text(text, encoding="utf-8")
    command = [find_multitool(), "validate", "f.sarif", "--rule-kind", "Sarif;Ghas", "--level", "Error;Warning;Note"]
    environment = {**os.environ, "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"}
    command += ["--output", "out.sarif", "--log", "ForceOverwrite"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    (run,) = json.loads((folder / "out.sarif").read_text(encoding="utf-8-sig"))["runs"]
    return [(found["ruleId"], found.get("level", "warning")) for found in run.get("results", [])]


@pytest.mark.skipif(find_multitool() is None, reason="no sarif-multitool: .ci/run installs it")
@pytest.mark.parametrize("options", [{}, {"hostile": True, "synthetic": True}, {"empty": True}], ids=str)
def test_no_error_and_no_warning(options, tmp_path):
    found = judged(sarif(make_audit(60, **options)), tmp_path)
    assert found
    assert [rule for rule, level in found if level == "error"] == []
    assert {rule for rule, level in found if level == "warning"} <= ALLOWED
