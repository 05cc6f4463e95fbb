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
    [
        ["--help"],
        ["diff", "a"],
        ["absent.py", "--formats", "x"],
    ],
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
    ("words", "meant"),
    [
        (["model.py", "--fromats", "fp16"], "--formats"),
        (["model.py", "--max_error=0.1"], "--max-error"),
        (["model.py", "--basline", "x", "--quite"], "--baseline and --quiet"),
        (["diff", "a", "b", "--htlm", "c.html"], "--html"),
    ],
)
def test_a_misspelt_option_is_told_from_what_it_was_meant_to_be(words, meant, capsys):
    assert cli.main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(f": did you mean {meant}?")
    assert second.startswith("hint: ")


def test_an_option_like_no_other_is_just_refused(capsys):
    assert cli.main(["model.py", "--zzzzzzz"]) == 2
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --zzzzzzz\n")
