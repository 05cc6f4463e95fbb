"""On a terminal something moves at least every two seconds, from the first line to the prompt, in every kind of audit, and the share grows to all."""

import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import pytest

MODEL = """
import time, torch
from torch import nn
time.sleep(3)
CALLS = []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 512), nn.LayerNorm(512), nn.Linear(512, 8000)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)) for _ in range(8)])
    def forward(self, x):
        end = time.monotonic() + (2.5 if len(CALLS) == 4 else 0)
        CALLS.append(end)
        while time.monotonic() < end:  # at work inside of one operation, and not asleep
            pass
        return self.last(torch.softmax(self.norm(self.body(self.first(x))) * 20, -1)).log_softmax(-1)
def get_model(): time.sleep(3); return Net()
def get_inputs(): torch.manual_seed(1); return torch.randn(256, 64)
def get_batch(): return torch.randn(256, 64), torch.randint(0, 8000, (256,))
def loss(out, target): return nn.functional.nll_loss(out, target)
def score(model):
    with torch.no_grad():
        time.sleep(2.5)
        return float(model(get_inputs()).mean())
"""
AUDITS = {
    "plain": [],
    "training": ["--mode", "training", "--inputs", "net.py:get_batch", "--loss", "net.py:loss"],
    "scored": ["--evaluate", "net.py:score", "--max-drop", "1"],
    "criterion": ["--criterion", "output: kl <= 0.0001"],
    "refused": ["--criterion", "nothing: kl <= 0.0001"],
}
ALLOWED = 2.0


def told(folder: Path, words: list[str]) -> tuple[list[tuple[float, str]], int]:
    """(seconds without anything new, what stood there) of every change of the terminal, and the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.pop("CI", None)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        os.execv(sys.executable, [sys.executable, "-m", "auditor", "net.py", *words])
    waited, since, stood = [], time.monotonic(), ""
    while True:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown = os.read(terminal, 1 << 16)
            except OSError:  # all who held it are gone
                break
            waited.append((time.monotonic() - since, stood))
            since, stood = time.monotonic(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))
    _, status = os.waitpid(pid, 0)
    return [*waited, (time.monotonic() - since, stood)], os.waitstatus_to_exitcode(status)


@pytest.mark.slow
@pytest.mark.parametrize("kind", AUDITS)
def test_no_stretch_is_silent(kind: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    waited, code = told(tmp_path, [*AUDITS[kind], "--fail-on", "never"])
    assert code == (2 if kind == "refused" else 0)
    assert max(waited)[0] < ALLOWED, sorted(waited)[-3:]
    shares = [int(share) for _, stood in waited for share in re.findall(r"(\d+)% done", stood)]
    assert shares == sorted(shares)
    lines = " ".join(stood for _, stood in waited)
    stages = re.findall(r"\(stage (\d+) of (\d+)\)", lines)
    assert kind == "refused" or shares[-1] >= 85  # as the files are written
    assert {int(place) for place, _ in stages} >= ({1} if kind == "refused" else {1, 2, int(stages[-1][1])})
