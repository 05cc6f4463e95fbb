"""The command `replay`: from a training script and its capsule to one page and one JSON file."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.cli import main

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

import auditor

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.inner(x)
        scores = h @ h.T
        return self.drop(scores.softmax(-1)) @ h


model = nn.Sequential(Attention(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
recorder = auditor.watch(model, optimizer, scaler, folder="capsules")


@recorder.step
def step(x, y):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


if __name__ == "__main__":
    for i in range(60):
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        if i == 50:
            x[3] *= 500
        step(x, y)
"""


LINE = f"train.py:{SCRIPT[: SCRIPT.index('scores =')].count(chr(10)) + 1}"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that ran as a script of its own, and its capsule."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "-W", "ignore", "train.py"], check=True, cwd=folder)
    return folder


@pytest.fixture
def trained(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the capsule, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    (capsule,) = (script / "capsules").glob("*-loss-not-finite")
    return Path(shutil.copytree(capsule, tmp_path / "capsules" / capsule.name))


def test_one_page_and_one_file_of_data(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trained), "--quiet", "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert f"matmul in 0 ({LINE}): overflow: a value exceeds 65504" in " ".join(said.split())
    data = json.loads(Path("out/replay.json").read_text())
    assert data["is_reproduced"]
    assert data["culprit"]["line"] == LINE
    assert data["culprit"]["module"] == "0"
    assert not data["fails_in_fp32"]
    by_name = {one["name"]: one for one in data["outcomes"]}
    assert {"fp32", "as_written", "bf16_autocast", "fp16_autocast", "bf16", "plan"} <= by_name.keys()
    assert data["repair"] == "plan"
    assert by_name["plan"]["problem"] == ""
    page = Path("out/replay.html").read_text()
    assert LINE in page
    assert "<h2>The step in every recipe</h2>" in page
    assert sorted(path.name for path in Path("out").iterdir()) == ["replay.html", "replay.json"]


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["replay", *words, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 2
    assert not Path("audits").exists() or not list(Path("audits").glob("*/replay.*"))
    return said


def test_wrong_input_is_one_line_and_exit_code_2(
    script: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is no capsule" in error_of(["nothing"], capsys)
    assert "has no 'other'" in error_of([str(trained), f"{script / 'train.py'}:other"], capsys)
    other = Path("other.py")
    other.write_text(SCRIPT.replace("nn.Linear(8, 4)", "nn.Linear(8, 5)"))
    assert "no model of the file has the capsule's 4 weights" in error_of([str(trained), "other.py:step"], capsys)
    (trained / "state.pt").write_bytes((trained / "state.pt").read_bytes()[:1000])
    assert "cannot be read" in error_of([str(trained)], capsys)
    (trained / "capsule.json").write_text("{}")
    assert "cannot be read" in error_of([str(trained)], capsys)


def test_a_step_that_cannot_be_imported_needs_a_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((trained / "capsule.json").read_text())
    for code, expected in (
        ({**data["code"], "name": "main.<locals>.step"}, "defined inside another function"),
        ({**data["code"], "file": "/elsewhere/train.py"}, "does not exist here"),
        (None, "does not name a training step"),
    ):
        (trained / "capsule.json").write_text(json.dumps({**data, "code": code}))
        assert expected in error_of([str(trained)], capsys)
