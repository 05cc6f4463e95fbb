"""`--baseline`, `--dry-run` and `--model-explorer` as the command line handles them; the stages are stand-ins."""

import importlib
import json
from contextlib import nullcontext

import pytest

from auditor import cli
from tests.unit.report.factory import make_audit

MODEL = "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(3, 4)\ndef get_inputs(): return torch.ones(2, 3)\n"


@pytest.fixture
def folder(monkeypatch, here):
    """A model to point at; the audit of it is always the same, with errors and warnings."""
    ran = []

    def run(subject, options):
        ran.append(subject)
        return make_audit(60)

    monkeypatch.setattr(importlib.import_module("auditor.flow"), "run", run)
    monkeypatch.setattr("auditor.verify.artefact.standby", nullcontext)  # nothing is run there
    (here / "model.py").write_text(MODEL)
    return here, ran


def test_only_new_findings_fail_and_are_annotated(folder, capsys):
    path, ran = folder
    document = make_audit(60).to_dict()
    (path / "all.json").write_text(json.dumps(document))
    document["findings"] = [finding for finding in document["findings"] if finding["severity"] != "error"]
    (path / "old.json").write_text(json.dumps(document))
    assert cli.main(["model.py", "-q", "--baseline", "old.json"]) == 1
    assert "1 new" in capsys.readouterr().out
    assert cli.main(["model.py", "-q", "--baseline", "all.json", "--fail-on", "info"]) == 0
    assert "0 new" in capsys.readouterr().out
    cli.main(["model.py", "-q", "--baseline", "old.json", "--format", "github"])
    (annotation,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("::"))
    assert "RNG001" in annotation
    ran.clear()
    assert cli.main(["model.py", "--baseline", "absent.json"]) == 2
    assert "absent.json cannot be read" in capsys.readouterr().err
    assert ran == []


def test_a_baseline_may_be_the_directory_of_an_audit_and_come_from_the_configuration(folder):
    path, _ = folder
    assert cli.main(["model.py", "-q", "--out", "first"]) == 1
    (path / "pyproject.toml").write_text('[tool.auditor]\nbaseline = "first"\n')
    assert cli.main(["model.py", "-q"]) == 0


def test_dry_run_says_what_was_found_and_writes_nothing(folder, capsys):
    path, ran = folder
    assert cli.main(["model.py", "--dry-run", "--formats", "bf16", "--fail-on", "info"]) == 0
    captured = capsys.readouterr()
    assert "Linear with 16 parameters, from model" in captured.out
    assert "1 batch of float32[2, 3], from model.py:get_inputs" in captured.out
    assert "autocast_bf16, cast_bf16; error budget 0.01" in captured.out
    assert "random initialization" in captured.out
    assert "weights are RANDOM" in captured.err
    assert ran == []
    assert [p.name for p in path.iterdir()] == ["model.py"]


def test_model_explorer_files_lie_beside_the_report(folder):
    path, _ = folder
    cli.main(["model.py", "-q", "--model-explorer"])
    written = {p.name for p in (path / "audits" / "model" / "model_explorer").iterdir()}
    assert {"graph.json", "fp16_effect.json", "bf16_verdict.json", "plan.json"} <= written
