"""What is said of the options themselves, before torch is imported: help, version, misspellings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import auditor
from auditor import cli


@pytest.mark.parametrize(
    "words",
    [["--help"], ["absent.py", "--formats", "x"]],
)
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
