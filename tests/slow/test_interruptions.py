"""Kills and Ctrl-C at random moments of every command: nothing outlives it, and it ends at once, in one line.

`INTERRUPTIONS` is the number of moments for each signal, `DRAWN_SEED` draws others. The limits in seconds need an otherwise
idle machine.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.files.test_process import mine

MOMENTS = int(os.environ.get("INTERRUPTIONS", "40"))
SEED = int(os.environ.get("DRAWN_SEED", "0"))
AT_MOST = 1.0
"""Seconds after which nothing of a command may be left."""

MODEL = """
import torch
from torch import nn

def get_model():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))

def get_inputs():
    return torch.randn(16, 64)
"""
FILES = {
    "net.py": MODEL,
    "train.py": MODEL
    + """
net = get_model()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

def step(x):
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
""",
    "slow_import.py": "import time\nfor _ in range(1000):\n    time.sleep(0.01)\n" + MODEL,
    "busy_import.py": "sum(range(10**10))\n" + MODEL,
    "catches.py": "import time\nwhile True:\n    try:\n        time.sleep(10)\n    except BaseException:\n        pass\n",
    "fleet.toml": "".join(
        f'[[target]]\nname = "{name}"\ntarget = "{name}.py"\n\n' for name in ("net", "slow_import", "catches")
    ),
}
COMMANDS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "imports of the command": (0.8, ("net.py",)),
    "audit": (8.0, ("net.py",)),
    "verification": (8.0, ("net.py", "--formats", "bf16", "--quick")),
    "rehearsal": (12.0, ("rehearse", "train.py:step", "--steps", "2000")),
    "fleet": (10.0, ("fleet", "fleet.toml", "--out", "out", "--jobs", "2")),
    "import that sleeps": (9.0, ("slow_import.py",)),
    "import that computes": (9.0, ("busy_import.py",)),
    "import that catches all": (9.0, ("catches.py",)),
}
"""{what is interrupted: (latest moment in seconds, words of the command)}."""


@contextmanager
def started(name: str, folder: Path, root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, in a process group of its own, as a shell starts it: Ctrl-C reaches it, also if the tests themselves run
    in the background, where it is ignored. Nothing is left of it at the end."""
    for file, text in FILES.items():
        (folder / file).write_text(text)
    (folder / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "auditor", *COMMANDS[name][1]]
    piped = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what ignores a signal starts what ignores it
    try:
        process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **piped)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        for left in {process.pid, *mine(folder / "tmp")}:
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        process.wait()


def moments(kind: str) -> list[tuple[str, float, int]]:
    """(command, seconds after its start, number): as many as asked for, over all commands."""
    draw = random.Random(f"{kind} {SEED}")
    names = list(COMMANDS)
    result = []
    for number in range(MOMENTS):
        name = names[number % len(names)]
        result.append((name, round(draw.uniform(0.05, COMMANDS[name][0]), 2), number))
    return result


def left_after(folder: Path, seconds: float) -> list[int]:
    """Processes of the command that are left after so many seconds, or earlier none."""
    until = time.monotonic() + seconds
    while (left := mine(folder / "tmp")) and time.monotonic() < until:
        time.sleep(0.02)
    return left


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(("name", "after", "number"), moments("kill"))
def test_nothing_outlives_a_killed_command(name: str, after: float, number: int, tmp_path: Path, root: Path) -> None:
    with started(name, tmp_path, root) as process:
        time.sleep(after)
        process.kill()
        process.communicate()
        assert left_after(tmp_path, AT_MOST) == []


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(("name", "after", "number"), moments("ctrl-c"))
def test_ctrl_c_ends_a_command_in_one_line(name: str, after: float, number: int, tmp_path: Path, root: Path) -> None:
    """Every second moment has a second Ctrl-C after a tenth of a second."""
    with started(name, tmp_path, root) as process:
        time.sleep(after)
        if process.poll() is not None:
            assert process.returncode == 0, process.communicate()[1].decode()
            return
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        if number % 2 and left_after(tmp_path, 0.1):
            os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=60)[1].decode()
        took = time.monotonic() - began
        if process.returncode == -signal.SIGINT and str(root / "auditor") not in errors:
            return  # Python itself was starting
        assert process.returncode == 130, errors
        assert errors.count("interrupted") == 1, errors
        assert errors.rstrip().endswith("interrupted")
        assert "Traceback" not in errors
        assert took < AT_MOST
        assert left_after(tmp_path, AT_MOST) == []
