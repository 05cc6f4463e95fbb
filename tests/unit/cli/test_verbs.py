"""Verbs that explain: rules, and errors by name."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import auditor
from auditor import cli
from auditor.asked import OPTIONS
from auditor.capture.places import portable_path
from auditor.document.read import default_directory
from auditor.resources import errors
from tests.unit.report.factory import HOSTILE, make_audit


def test_rules_and_explain(capsys):
    assert cli.main(["rules", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert cli.main(["rules"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert cli.main(["explain", rows[0]["code"].lower()]) == 0
    assert rows[0]["name"] in capsys.readouterr().out


def test_errors_are_explained_by_name(capsys):
    assert cli.main(["explain", "missing-target"]) == 0
    assert capsys.readouterr().out == f"missing-target\n\n{errors()['missing-target']}\n"
    assert cli.main(["explain", "mising-target"]) == 2
    assert "did you mean missing-target?" in capsys.readouterr().err
    assert cli.main(["explain", "sft01"]) == 2
    assert "did you mean SFT001?" in capsys.readouterr().err


# What is said of the options themselves, before torch is imported: help, version, misspellings.


@pytest.mark.parametrize("words", [["--help"], ["absent.py", "--formats", "x"]])
def test_torch_is_not_imported_before_it_is_needed(root, words):
    code = f"""
import sys
from auditor.cli import main
try:
    main({words!r})
finally:
    assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "AssertionError" not in done.stderr
    assert done.returncode in (0, 2)


def help_of(words, capsys):
    """The text that `--help` prints."""
    with pytest.raises(SystemExit) as left:
        cli.main([*words, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], *([name] for name in cli.VERBS)], ids=lambda words: " ".join(words) or "no verb")
def test_help_fits_80_columns_and_shows_commands_that_parse(words, here, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    (here / "audits" / "all").mkdir(parents=True)
    shown = help_of(words, capsys)
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.partition("\n\n")[0].splitlines()) <= 3  # the usage
    examples = [line.strip() for line in shown.partition("examples:\n")[2].splitlines()]
    assert [line[:2] for line in examples[::2]] == ["# "] * (len(examples) // 2)
    commands = examples[1::2]
    assert 2 <= len(commands) <= 5
    for command in commands:
        said = shlex.split(command.partition(" > ")[0].removeprefix("python -m auditor "))
        verb = cli.parse(said)
        assert isinstance(verb, cli.VERBS[words[0] if words else "audit"])


def test_help_of_an_audit_groups_its_options(capsys):
    for words in ([], ["audit"]):
        shown = help_of(words, capsys)
        titles = [f"\n{title}:\n" for title in (*cli.GROUPS, "general")]
        starts = [shown.index(title) for title in titles]
        assert starts == sorted(starts)
        for title, start, end in zip(cli.GROUPS, starts, starts[1:], strict=False):
            members = [OPTIONS[name].flag for name in cli.GROUPS[title]]
            assert re.findall(r"(?m)^  (--[a-z-]+)", shown[start:end]) == members


def test_the_version_is_said_by_every_verb(capsys):
    for words in (["--version"], ["diff", "--version"], ["model.py", "--version"]):
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 0
        assert capsys.readouterr().out == f"auditor {auditor.__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.py", "--max_error=0.1"], ": did you mean --max-error?"),
        (["model.py", "--basline", "x", "--quite"], ": did you mean --baseline and --quiet?"),
        (["diff", "a", "b", "--htlm", "c.html"], ": did you mean --html?"),
        (["model.py", "--cache"], "error: unrecognized arguments: --cache"),
        (["fleet", "a.toml", "--out", "b", "--jobs", "many"], "--jobs takes a whole number, not 'many'"),
        (["fleet", "a.toml"], "the following arguments are required: --out"),
        (["rules", "--format", "sarif"], "invalid choice: 'sarif'"),
    ],
)
def test_a_wrong_option_is_one_line_and_what_was_meant(words, said, capsys):
    assert cli.main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert said in first and ("did you mean" in first) is ("did you mean" in said)
    assert second.startswith("hint: ")


# Where a command's files go: the default, and what stands in their way.

AUDIT = make_audit(4)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("net-Net", "net-Net"), ("../../etc", "_.._etc"), ("a/b c\n", "a_b_c_"), ("..", "model"), ("", "model")],
)
def test_default_directory_stays_under_audits(name, folder):
    assert default_directory(SimpleNamespace(name=name, origin=None)) == Path("audits") / folder


def test_a_model_of_another_file_gets_a_directory_of_its_own(here):
    first, other = (SimpleNamespace(name="net", origin=SimpleNamespace(path=str(here / at))) for at in ("b/n", "a/n"))
    replace(AUDIT, subject=replace(AUDIT.subject, file=portable_path(first.origin.path))).save(here / "audits" / "net")
    assert [default_directory(one) for one in (first, other)] == [Path("audits/net"), Path("audits/a-net")]


# `--evaluate` from the command line: stdout stays clean, and the exit code follows.


MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
X = torch.linspace(-2, 2, 320).reshape(40, 8).sin()
Y = model(X).detach()

def get_inputs():
    return X[:4]

def near(net, limit=1e-3):
    print("printed by the function")
    for x, y in zip(X.split(8), Y.split(8)):
        yield (net(x).float() - y).norm(dim=1) <= limit * y.norm(dim=1)

def broken(net):
    raise ValueError("no labels here")
"""


@pytest.fixture
def folder(here: Path) -> Path:
    (here / "scored_model.py").write_text(MODEL)
    return here


@pytest.mark.slow
def test_a_score_that_drops_fails_and_stdout_is_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["scored_model.py", "--formats", "bf16", "--strategies", "cast", "--format", "json", "-q"]
    assert cli.main([*options, "--evaluate", "near", "--max-drop", "0.05"]) == 1
    found = json.loads(capfd.readouterr().out)
    plan = found["plans"]["cast_bf16"]
    assert {"function": "near", "max_drop": 0.05, "score": 1.0, "samples": 40}.items() <= found["evaluation"].items()
    assert plan["verification"]["holds"]
    assert found["recommended"] is None
    assert plan["score"]["passed"] is False
    assert plan["score"]["difference"] < -0.05


def test_a_dry_run_says_what_would_be_scored(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scored_model.py", "-q", "--dry-run", "--evaluate", "near(limit=1e-2)", "--max-drop", "0.5"]) == 0
    said = "Score    near(limit=1e-2) on FP32 and every verified plan; higher is better; at most 0.5 worse than FP32"
    assert said in capfd.readouterr().out


# The verb `diff`, in words, as JSON and as a page.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two audits; the second has lost one finding, gained another and broken one operation."""
    base = tmp_path_factory.mktemp("audits")
    before = make_audit(60)
    extra = replace(before.findings[0], rule="NEW001", name="a-new-thing", severity="error", message="something new")
    after = replace(before, findings=(*before.findings[1:], extra), max_error=0.5)
    hostile = make_audit(60, hostile=True)
    for name, audit in {"before": before, "after": after, "hostile": hostile}.items():
        (base / name).mkdir()
        (base / name / "plan.json").write_text(json.dumps(audit.to_dict()), encoding="utf-8")
    return base


@pytest.fixture
def run(folders, monkeypatch, capsys):
    monkeypatch.chdir(folders)
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words):
        code = cli.main(["diff", *words])
        return code, capsys.readouterr()

    return call


def test_text_fits_and_says_what_changed(run):
    code, out = run("before", "after")
    assert code == 0
    assert "1 new finding, 1 gone" in out.out
    assert "autocast_fp16 is recommended in both audits" in out.out
    assert "NEW001" in out.out
    assert "Budget: 0.01 relative L2" in " ".join(out.out.split())
    assert [line for line in out.out.splitlines() if len(line) > 100 and not line.startswith("model.py:")] == []
    assert "\x1b" not in out.out
    assert out.err == ""
    assert "Nothing changed" in run("before", "before")[1].out


@pytest.mark.parametrize(("level", "code"), [("never", 0), ("error", 1), ("warning", 1)])
def test_exit_code_counts_new_findings_only(run, level, code):
    assert run("before", "after", "--fail-on", level)[0] == code
    assert run("after", "after", "--fail-on", level)[0] == 0


def test_json(run):
    found = json.loads(run("before", "after", "--format", "json")[1].out)
    assert [f["rule"] for f in found["new"]] == ["NEW001"]
    assert len(found["gone"]) == 1
    assert found["kept"] == len(make_audit(60).findings) - 1
    assert (found["before"]["name"], found["after"]["file"]) == ("TinyGPT", "after")


def test_html_holds_the_same_and_escapes_names(run, folders):
    run("before", "after", "--html", "page/diff.html")
    page = (folders / "page" / "diff.html").read_text()
    assert "NEW001" in page
    assert "default-src 'none'" in page
    run("before", "hostile", "--html", "page/hostile.html")
    page = (folders / "page" / "hostile.html").read_text()
    assert HOSTILE.split("\x1b")[0] not in page
    assert "<img" not in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("before", "absent"), "absent cannot be read"),
        (("before", "after", "--html", "before"), "before is a directory"),
        (("before", "after", "--html", "before/plan.json/x.html"), "(Not a directory)"),
    ],
)
def test_bad_input_is_one_line(run, words, text):
    code, out = run(*words)
    assert code == 2
    (line,) = [line for line in out.err.splitlines() if line.startswith("error: ")]
    assert text in line
    assert out.out == ""


# The completion script, sourced by a real shell.


@pytest.fixture
def script(tmp_path):
    """What docs/command-line.md says to run."""
    command = [sys.executable, "-m", "shtab", "--shell=bash", "--prog=auditor", "auditor.cli.parser"]
    (tmp_path / "auditor").write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return tmp_path / "auditor"


def offered(script, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    line = f"""
        source {script}
        function=$(complete -p auditor | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        COMP_WORDS=(auditor {" ".join(repr(word) for word in words)}); COMP_CWORD={len(words)}
        $function auditor "${{COMP_WORDS[$COMP_CWORD]}}" "${{COMP_WORDS[$((COMP_CWORD - 1))]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_verbs_options_and_choices_are_offered(script):
    assert "explain" in offered(script, "ex")
    assert "--max-error" in offered(script, "--max")
    assert offered(script, "--fail-on", "wa") == ["warning"]
    assert "--html" in offered(script, "diff", "--h")
    (script.parent / "plan.json").touch()
    assert "plan.json" in offered(script, "apply", "pl")
