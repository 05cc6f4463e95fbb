"""`--evaluate` from the command line: stdout stays clean, the exit code follows, and what is wrong is said before the audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from auditor import cli

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
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scored_model.py").write_text(MODEL)
    return tmp_path


def error(text: str) -> str:
    """The one line of stderr that is an error."""
    (found,) = (line for line in text.splitlines() if line.startswith("error: "))
    return found


def test_a_score_that_drops_fails_the_command_and_stdout_is_json(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["scored_model.py", "--formats", "bf16", "--strategies", "cast", "--format", "json", "-q"]
    assert cli.main([*options, "--evaluate", "near", "--max-drop", "0.05"]) == 1
    found = json.loads(capfd.readouterr().out)
    plan = found["plans"]["cast_bf16"]
    assert {"function": "near", "max_drop": 0.05, "score": 1.0, "samples": 40}.items() <= found["evaluation"].items()
    assert plan["verified"]
    assert found["recommended"] is None
    assert plan["score"]["passed"] is False
    assert plan["score"]["difference"] < -0.05


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--evaluate", "nowhere"], "scored_model.py has no 'nowhere'"),
        (["--evaluate", "other.py:accuracy"], "other.py does not exist"),
        (["--max-drop", "0.1"], "give evaluate as well, or leave them out"),
        (["--better", "lower"], "give evaluate as well, or leave them out"),
    ],
)
def test_what_names_no_score_is_refused_at_once(
    folder: Path, capfd: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert cli.main(["scored_model.py", "-q", *options]) == 2
    assert words in error(capfd.readouterr().err)


def test_a_dry_run_says_what_would_be_scored(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scored_model.py", "-q", "--dry-run", "--evaluate", "near(limit=1e-2)", "--max-drop", "0.5"]) == 0
    said = "Score    near(limit=1e-2) on FP32 and every verified plan; higher is better; at most 0.5 worse"
    assert said in capfd.readouterr().out
