"""The emitted file in a process of its own: nothing of this one can help it to work, nor does it fall with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import first_line
from ..records import Batch
from .lifetime import end
from .running import Answers

TIMEOUT = 1800.0
"""Seconds after which a plan that has not answered is given up."""

READY, UNREAD = "ready", "unread"
"""Files that say how far the process came: the model is built; the inputs could not be read."""


class NotHandedOver(Exception):
    """The inputs cannot be taken to another process."""


def verify_emitted(
    patched_file: Path,
    plans: Sequence[str],
    batches: Sequence[Batch],
    scratch: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    gradients: bool = True,
    most: int | None = None,
    timeout: float | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> dict[str, Answers | str]:
    """What each plan of `patched_model.py` answers on each batch, or the one-line reason why it does not.

    One process imports the file by its path, as a user's script would, and runs the plans one after the other. Where it
    dies or hangs, the plan that it was at has failed, and another process goes on with the rest.
    scratch: a folder that may go with this process, should it be killed. gradients, most: see `answers_of`. timeout: seconds for
    a plan to answer, TIMEOUT unless given. waiting: called every second.
    Raises: NotHandedOver where the inputs cannot be pickled, or read again.
    """
    job: dict[str, Any] = {
        "file": str(patched_file),
        "batches": str(scratch / "batches.pt"),
        "scratch": str(scratch),
        "seed": seed,
        "device": device,
        "gradients": gradients,
        "most": most,
    }
    try:
        torch.save(list(batches), job["batches"])
    except Exception as error:
        raise NotHandedOver(str(error)) from error
    found: dict[str, Answers | str] = {}
    while left := [plan for plan in plans if plan not in found]:
        folder = scratch / f"process_{len(found)}"
        (folder / "cwd").mkdir(parents=True)
        found |= _answered(folder, {**job, "plans": left}, left, timeout or TIMEOUT, waiting)
    return found


def _answered(
    folder: Path, job: dict[str, Any], plans: Sequence[str], timeout: float, waiting: Callable[[], None]
) -> dict[str, Answers | str]:
    """What one process answers; the plan that it did not survive among that, or all where it did not get to them."""
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    files = [folder / f"{index}.pt" for index in range(len(plans))]
    failure = _run(folder, files, timeout, waiting)
    if (folder / UNREAD).exists():
        raise NotHandedOver("the inputs cannot be read in another process")
    found = {plan: _read(file) for plan, file in zip(plans, files, strict=True) if file.exists()}
    missing = [plan for plan in plans if plan not in found]
    lost = missing[:1] if (folder / READY).exists() else missing
    return found | dict.fromkeys(lost, failure)


def _run(folder: Path, files: Sequence[Path], timeout: float, waiting: Callable[[], None]) -> str:
    """Run the process to its end; how that came, should it have left a plan without an answer."""
    command = [sys.executable, "-m", f"{__package__}.worker", str(folder)]
    with (folder / "stderr").open("wb") as stderr:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder / "cwd",
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            return f"the process that runs patched_model.py could not be started: {error}"
        try:
            hung = not _ended(process, files, timeout, waiting)
        finally:
            end(process)
    if hung:
        return f"the process that ran it gave no answer within {timeout:g} seconds"
    return _ending(process.returncode, folder / "stderr")


def _ended(
    process: subprocess.Popen[bytes], files: Sequence[Path], timeout: float, waiting: Callable[[], None]
) -> bool:
    """Wait for the process; False as soon as it takes longer than `timeout` over one plan."""
    since, answered = time.monotonic(), 0
    while time.monotonic() - since < timeout:
        try:
            process.wait(min(1.0, timeout))
            return True
        except subprocess.TimeoutExpired:
            waiting()
            count = sum(file.exists() for file in files)
            if count == len(files):  # what else goes on in there is nobody's concern
                return True
            if count > answered:
                since, answered = time.monotonic(), count
    return False


def _ending(code: int, stderr: Path) -> str:
    """How a process ended, with the last line it wrote."""
    text = stderr.read_bytes()[-4096:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    last = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in lines[-1].strip()) if lines else ""
    how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code} and no answer"
    return f"the process that ran it {how}" + (f": {last[:300]}" if last else "")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(file: Path) -> Answers | str:
    try:
        content = torch.load(file, weights_only=True)
    except Exception as error:
        return f"its outputs cannot be read outside of its process: {first_line(error)[:200]}"
    return str(content["failure"]) if "failure" in content else Answers(**content)


def _environment() -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[2])  # a plain checkout is found without being installed
    paths = [*(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p), here]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
