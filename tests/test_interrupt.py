"""Ctrl-C in a real process: exit code 130, one word on stderr, and files whole or not there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(48)))
def get_inputs(): return torch.randn(4, 16)
"""


def heard() -> None:
    """What a shell runs in the background inherits that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted_at(stage: str, folder: Path, root: Path) -> subprocess.Popen[str]:
    """An audit that got SIGINT when it announced the stage, run to its end."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "CI": "1",
    }
    command = [sys.executable, "-m", "auditor", "model.py", "--out", "out", "--formats", "bf16", "--strategies", "cast"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=heard,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"{stage}:"):
            process.send_signal(signal.SIGINT)
            break
    process.rest = process.stderr.read()
    process.wait(timeout=60)
    return process


@pytest.mark.parametrize(
    "stage", [pytest.param("measure", marks=pytest.mark.slow), "plan", pytest.param("write", marks=pytest.mark.slow)]
)
def test_nothing_half_written_is_left(stage, root, tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text("an older plan")
    process = interrupted_at(stage, tmp_path, root)
    assert process.returncode == 130
    assert process.rest.endswith("interrupted\n")
    assert "Traceback" not in process.rest
    assert {path.name for path in tmp_path.iterdir()} == {"model.py", "out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json"}
    assert (tmp_path / "out" / "plan.json").read_text() == "an older plan"
