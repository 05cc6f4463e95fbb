"""The command line: exit codes, streams, errors; the stages are stand-ins here."""

import importlib
import json
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from auditor import cli
from auditor.errors import CaptureError
from auditor.records import Audit, Environment
from auditor.records.audit import FILES
from auditor.records.folder import write
from auditor.reporters import REPORTERS
from tests.unit.report.factory import make_audit

MODEL = """
import torch
print("noise from the user's file")
model = torch.nn.Linear(3, 4)
def get_inputs(): return torch.ones(2, 3)
"""


@dataclass(frozen=True)
class FakeAudit:
    """As much of an Audit as the command line touches."""

    findings: tuple[SimpleNamespace, ...] = ()
    recommended: str | None = "autocast_fp16"
    environment: Environment = field(default_factory=lambda: Environment("0", "2", "cpu", "emulated", 0))
    seconds: Mapping[str, float] = field(default_factory=dict)

    def save(self, directory: Path) -> tuple[Path, ...]:
        return write(directory, dict.fromkeys(FILES, "whole"))


class Stages:
    """Stands in for `flow.run`: keeps what it was called with, answers or raises what a test says."""

    def __init__(self) -> None:
        self.severities: tuple[str, ...] = ()
        self.audit: Audit | None = None
        self.error: BaseException | None = None
        self.calls: list[dict] = []

    def run(self, subject, options):
        self.calls.append({"subject": subject, **vars(options)})
        options.progress("capture", "12 nodes", 0, 0)
        print("noise from the model")
        if self.error:
            raise self.error
        return self.audit or FakeAudit(tuple(SimpleNamespace(severity=s) for s in self.severities))


@pytest.fixture
def reported(monkeypatch, here) -> Stages:
    """The stand-in with the real reporters, for a whole audit with errors and warnings."""
    fake = Stages()
    fake.audit = make_audit(60)
    monkeypatch.setattr(importlib.import_module("auditor.flow"), "run", fake.run, raising=False)
    monkeypatch.setattr("auditor.verify.artefact.standby", nullcontext)  # nothing is run there
    (here / "model.py").write_text(MODEL)
    return fake


@pytest.fixture
def stages(monkeypatch, reported) -> Stages:
    """The stand-in with reporters that say nothing, for as much of an audit as the command line touches."""
    reported.audit = None
    monkeypatch.setattr("auditor.results.Audit.of", lambda audit: audit)
    monkeypatch.setattr("auditor.reporters.next_step", lambda audit, directory: "as is")
    monkeypatch.setattr("auditor.reporters.text", lambda audit, **_: "rendered by text\n")
    for name in set(REPORTERS) - {"json"}:
        monkeypatch.setitem(REPORTERS, name, lambda audit, name=name: f"rendered by {name}\n")
    return reported


def test_files_summary_and_streams(stages, capsys, tmp_path):
    assert cli.main(["model.py"]) == 0
    captured = capsys.readouterr()
    folder = tmp_path / "audits" / "model"
    assert {p.name for p in folder.iterdir()} == set(FILES)
    assert [p.name for p in (tmp_path / "audits").iterdir()] == ["model"]
    assert captured.out.startswith("rendered by text\n")
    assert "Report   audits/model/report.html" in captured.out
    assert captured.out.splitlines()[-1].split() == ["Next", "as", "is"]
    assert "noise" not in captured.out
    assert "noise from the model" in captured.err
    assert "load: model.py\n" in captured.err
    assert "capture: 12 nodes\n" in captured.err
    assert "warning: weights are RANDOM" in captured.err


@pytest.mark.parametrize(
    ("severities", "fail_on", "code"),
    [
        ((), "info", 0),
        (("warning", "info"), "warning", 1),
        (("warning",), None, 0),
        (("error",), "never", 0),
        (("error",), None, 1),
    ],
)
def test_exit_code_follows_the_worst_finding(stages, severities, fail_on, code):
    stages.severities = severities
    assert cli.main(["model.py", *(["--fail-on", fail_on] if fail_on else []), "-q"]) == code


def test_options_reach_the_stages(stages, tmp_path):
    words = ["model.py", "--formats", "bf16", "--strategies", "cast", "--max-error", "0.5", "--device", "cpu"]
    words += ["--mode", "training", "--loss", "x.py:loss"]
    words += ["--seed", "7", "--gpu", "RTX 4090", "--out", "else where", "--inputs", "x.py:f"]
    (tmp_path / "x.py").write_text("import torch\ndef f(): return torch.ones(5, 3)\ndef loss(y): return y.sum()\n")
    assert cli.main(words) == 0
    (call,) = stages.calls
    expected = {"formats": ("bf16",), "strategies": ("cast",), "max_error": 0.5, "device": "cpu", "mode": "training"}
    expected |= {"seed": 7, "gpu": "RTX 4090", "command": f"python -m auditor {shlex.join(words)}"}
    assert expected.items() <= call.items()
    assert call["subject"].batches[0][0][0].shape == (5, 3)
    assert call["subject"].objective.source == "--loss x.py:loss"
    assert (tmp_path / "else where" / "plan.json").exists()


def test_github_also_gets_a_summary_of_the_job(stages, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "summary.md").write_text("before\n")
    cli.main(["model.py", "--format", "github"])
    assert (tmp_path / "summary.md").read_text() == "before\nrendered by md\n"
    cli.main(["model.py", "--format", "text"])
    assert (tmp_path / "summary.md").read_text() == "before\nrendered by md\n"


def test_one_line_and_a_hint_for_what_the_user_can_mend(stages, capsys, tmp_path):
    stages.error = CaptureError("the model cannot\nbe traced", slug="no-trace")
    assert cli.main(["model.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == [
        "error: the model cannot be traced",
        "hint: `python -m auditor explain no-trace` explains this error",
    ]
    assert not (tmp_path / "audits").exists()


def test_bugs_are_one_line_too_and_debug_shows_the_traceback(stages, capsys):
    stages.error = TimeoutError("60 s")
    assert cli.main(["model.py"]) == 2
    assert "error: stopped by a time limit, TimeoutError: 60 s" in capsys.readouterr().err
    stages.error = ZeroDivisionError("oops")
    assert cli.main(["model.py", "-q"]) == 2
    plain = capsys.readouterr().err
    assert "error: internal error, ZeroDivisionError: oops" in plain
    assert "Traceback" not in plain
    assert "capture" not in plain
    assert cli.main(["model.py", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_native_code_that_fails_without_a_reason_is_most_often_out_of_memory(stages, capsys):
    stages.error = SystemError("<function _find_and_load> returned NULL without setting an exception")
    assert cli.main(["model.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "out of memory" in lines[-2]
    assert lines[-1] == "hint: `python -m auditor explain out-of-memory` explains this error"


def test_interrupt(stages, capsys, tmp_path):
    stages.error = KeyboardInterrupt()
    assert cli.main(["model.py"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert not (tmp_path / "audits").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "the following arguments are required: TARGET | VERB"),
        (["."], "give the file that contains the model, for example model.py"),
        (["model.py", "--weights", "absent.pt"], "absent.pt does not exist"),
        (["model.py", "--rules", "absent"], "absent"),
        (["model.py", "--formats", "fp17"], "--formats takes fp16"),
        (["model.py", "--loss", "x.py:loss"], "--loss needs --mode training"),
        (["model.py", "--evaluate", "nowhere"], "model.py has no 'nowhere'"),
        (["model.py", "--evaluate", "other.py:accuracy"], "other.py does not exist"),
        (["model.py", "--better", "lower"], "`max_drop` and `better` need `evaluate`"),
        (["model.py", "--out", "model.py/x"], "model.py"),
        (["model.py", "--out", "/dev/null"], "/dev/null"),
        (["explain", "XXX999"], "no rule or error is called XXX999"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(stages, capsys, tmp_path, words, text):
    assert cli.main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert text in line
    assert not (tmp_path / "audits").exists()
    assert stages.calls == []


def test_flags_in_the_configuration_and_the_command_line_takes_them_back(stages, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.auditor]\nquick = true\nquiet = true\nselect = ["NRM"]\nfail-on = "warning"\nout = "here"\n'
    )
    stages.severities = ("warning",)
    assert cli.main(["model.py", "--ignore", "NRM001"]) == 1
    assert (tmp_path / "here" / "plan.json").exists()
    assert cli.main(["model.py", "--no-quick", "--fail-on=error", "--select", "SFT,ACT001"]) == 0
    first, second = stages.calls
    assert (first["quick"], second["quick"]) == (True, False)
    assert (first["select"], [one.code for one in first["ignore"]]) == (("NRM",), ["NRM001"])
    assert second["select"] == ("SFT", "ACT001")


def test_flags_may_stand_before_or_behind_a_verb(stages, capsys):
    for words in (["--debug", "rules"], ["rules", "--debug"], ["--format", "json", "rules"]):
        assert cli.main(words) == 0
    assert cli.main(["-q", "--formats", "bf16", "model.py"]) == 0
    assert cli.main(["--out", "elsewhere", "audit", "-q", "model.py"]) == 0
    assert [call["formats"] for call in stages.calls] == [("bf16",), ("fp16", "bf16")]


def test_the_report_is_opened_when_it_is_there(stages, capsys, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert cli.main(["model.py", "-q", "--open", "--out", "a b"]) == 0
    assert opened == [(tmp_path / "a b" / "report.html").as_uri()]
    assert (tmp_path / "a b" / "report.html").exists()
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    capsys.readouterr()
    assert cli.main(["model.py", "-q", "--open"]) == 0
    assert "no browser could be opened; open audits/model/report.html yourself" in capsys.readouterr().err


# `--baseline`, `--dry-run` and `--model-explorer`.


def test_only_new_findings_fail_and_are_annotated(reported, capsys, tmp_path):
    document = make_audit(60).to_dict()
    (tmp_path / "all.json").write_text(json.dumps(document))
    document["findings"] = [finding for finding in document["findings"] if finding["severity"] != "error"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert cli.main(["model.py", "-q", "--baseline", "old.json"]) == 1
    assert "1 new" in capsys.readouterr().out
    assert cli.main(["model.py", "-q", "--baseline", "all.json", "--fail-on", "info"]) == 0
    assert "0 new" in capsys.readouterr().out
    cli.main(["model.py", "-q", "--baseline", "old.json", "--format", "github"])
    (annotation,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("::"))
    assert "RNG001" in annotation
    reported.calls.clear()
    assert cli.main(["model.py", "--baseline", "absent.json"]) == 2
    assert "absent.json cannot be read" in capsys.readouterr().err
    assert reported.calls == []


def test_a_baseline_may_be_the_directory_of_an_audit_and_come_from_the_configuration(reported, tmp_path):
    assert cli.main(["model.py", "-q", "--out", "first"]) == 1
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nbaseline = "first"\n')
    assert cli.main(["model.py", "-q"]) == 0


def test_equal_runs_give_equal_files_and_the_terminal_says_how_long_each_took(reported, tmp_path, capsys):
    written = []
    for _ in range(2):
        assert cli.main(["model.py", "-q", "--out", "out"]) == 1
        assert "\nTime     " in capsys.readouterr().out
        written.append({file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()})
    assert written[0] == written[1]
    assert "report.html" in written[0]


@pytest.mark.parametrize("words", [(), ("--out", "file/out")])
def test_a_dry_run_needs_no_directory_that_can_be_written(words, reported, tmp_path, capsys):
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "audits").write_text("no directory either")
    assert cli.main(["model.py", "--dry-run", *words]) == 0
    assert capsys.readouterr().err.count("error:") == 0


def test_dry_run_says_what_was_found_and_writes_nothing(reported, capsys, tmp_path):
    assert cli.main(["model.py", "--dry-run", "--formats", "bf16", "--fail-on", "info"]) == 0
    captured = capsys.readouterr()
    assert "Linear with 16 parameters, from model" in captured.out
    assert "1 batch of float32[2, 3], from model.py:get_inputs" in captured.out
    assert "autocast_bf16, cast_bf16; error budget 0.01" in captured.out
    assert cli.main(["model.py", "--dry-run", "--formats", "int8,nvfp4"]) == 0
    assert "autocast_bf16, cast_bf16, int8, nvfp4; error budget 0.01" in capsys.readouterr().out
    assert "random initialization" in captured.out
    assert "weights are RANDOM" in captured.err
    assert reported.calls == []
    assert [p.name for p in tmp_path.iterdir()] == ["model.py"]


def test_model_explorer_files_lie_beside_the_report(reported, tmp_path):
    cli.main(["model.py", "-q", "--model-explorer"])
    written = {p.name for p in (tmp_path / "audits" / "model" / "model_explorer").iterdir()}
    assert {"graph.json", "fp16_effect.json", "bf16_verdict.json", "plan.json"} <= written
