"""Verbs that explain: rules, and errors by name."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import auditor
from auditor import cli
from auditor.cli.verbs import default_directory
from auditor.document.places import portable_path
from auditor.resources import errors
from tests.unit.report.factory import make_audit


def test_rules_and_explain(capsys):
    assert cli.main(["rules", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert cli.main(["rules"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert cli.main(["rules", "--format", "md"]) == 0
    document = capsys.readouterr().out
    assert all(f"### {row['code']}: {row['name']}\n" in document for row in rows)
    assert cli.main(["explain", rows[0]["code"].lower()]) == 0
    assert rows[0]["name"] in capsys.readouterr().out


def test_errors_are_explained_by_name(capsys):
    for slug, text in errors().items():
        assert cli.main(["explain", slug]) == 0
        assert capsys.readouterr().out == f"{slug}\n\n{text}\n"
    assert "missing-target" in errors()
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
        (["model.py", "--zzzzzzz"], "error: unrecognized arguments: --zzzzzzz"),
        (["fleet", "a.toml", "--out", "b", "--jobs", "many"], "--jobs takes a whole number, not 'many'"),
        (["fleet", "a.toml"], "the following arguments are required: --out"),
        (["rules", "--format", "sarif"], "invalid choice: 'sarif'"),
    ],
)
def test_a_wrong_option_is_one_line_and_what_was_meant(words, said, capsys):
    assert cli.main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert said in first
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
