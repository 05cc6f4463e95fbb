"""The emitted file in a process of its own: nothing of this one can help it to work, nor does it fall with it."""

from __future__ import annotations

import json
import os
import shutil
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
from .lifetime import end, ended, hand
from .running import Answers

TIMEOUT = 1800.0
"""Seconds after which a plan that has not answered is given up."""

POLL, GRACE = 0.02, 1.0
"""Seconds between two looks for answers, and those that the process has to end when there is nothing left to run."""

READY, UNREAD = "ready", "unread"
"""Files that say how far the process came: the model is built; the inputs could not be read."""


class NotHandedOver(Exception):
    """The inputs cannot be taken to another process."""


class Verifier:
    """Emitted files of one model, run in a process of its own that is there from the first until the body ends.

    It imports a file by its path, as a user's script would, and runs the plans one after the other; the model is built
    for the first. Where it dies or hangs, the plan that it was at has failed, and another process goes on with the rest.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        scratch: Path,
        *,
        seed: int = 0,
        device: str = "cpu",
        gradients: bool = True,
        most: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """scratch: a folder that may go with this process, should it be killed. gradients, most: see `answers_of`.
        timeout: seconds for a plan to answer, TIMEOUT unless given. Raises: NotHandedOver where the inputs cannot be
        pickled."""
        self._scratch, self._timeout = scratch, timeout or TIMEOUT
        self._settings: dict[str, Any] = {
            "batches": str(scratch / "batches.pt"),
            "scratch": str(scratch),
            "seed": seed,
            "device": device,
            "gradients": gradients,
            "most": most,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._folder, self._begun = scratch, 0
        try:
            torch.save(list(batches), self._settings["batches"])
        except Exception as error:
            raise NotHandedOver(str(error)) from error

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None and self._process is not None:
            ended(self._process, GRACE)
        self._give_up()

    def answers(
        self, patched_file: Path, plans: Sequence[str], waiting: Callable[[], None] = lambda: None
    ) -> dict[str, Answers | str]:
        """What each plan of `patched_model.py` answers on each batch, or the one-line reason why it does not.

        waiting: called every second. Raises: NotHandedOver where the inputs cannot be read in the other process.
        """
        found: dict[str, Answers | str] = {}
        while left := [plan for plan in plans if plan not in found]:
            found |= self._answered(patched_file, left, waiting)
        return found

    def _answered(
        self, patched_file: Path, plans: Sequence[str], waiting: Callable[[], None]
    ) -> dict[str, Answers | str]:
        """What one process answers; the plan that it did not survive among that, or all where it did not get to them.

        Nothing where it had ended since it answered others.
        """
        job = self._numbered("job")
        (job / "job.json").write_text(json.dumps({"file": str(patched_file), "plans": list(plans)}), encoding="utf-8")
        files = [job / f"{index}.pt" for index in range(len(plans))]
        known = self._process
        try:
            failure = self._run(job, files, waiting)
            if (self._folder / UNREAD).exists():
                raise NotHandedOver("the inputs cannot be read in another process")
        except BaseException:
            self._give_up()
            raise
        found = {plan: _read(file) for plan, file in zip(plans, files, strict=True) if file.exists()}
        shutil.rmtree(job, ignore_errors=True)
        if not found and known is not None and self._process is None:
            return {}
        missing = [plan for plan in plans if plan not in found]
        lost = missing[:1] if (self._folder / READY).exists() else missing
        return found | dict.fromkeys(lost, failure)

    def _run(self, job: Path, files: Sequence[Path], waiting: Callable[[], None]) -> str:
        """Have a job done; how the process ended, should it have left a plan without an answer."""
        try:
            process = self._process = self._process or self._started()
        except OSError as error:
            return f"the process that runs patched_model.py could not be started: {error}"
        hand(process, str(job))
        if not _done(process, files, self._timeout, waiting):
            self._give_up()
            return f"the process that ran it gave no answer within {self._timeout:g} seconds"
        if process.poll() is None:
            return ""
        self._give_up()
        return _ending(process.returncode, self._folder / "stderr")

    def _started(self) -> subprocess.Popen[bytes]:
        self._folder = self._numbered("process")
        (self._folder / "cwd").mkdir()
        (self._folder / "settings.json").write_text(json.dumps(self._settings), encoding="utf-8")
        with (self._folder / "stderr").open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(self._folder)],
                cwd=self._folder / "cwd",
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def _numbered(self, name: str) -> Path:
        """A folder of that name that there is not yet."""
        self._begun += 1
        folder = self._scratch / f"{name}_{self._begun}"
        folder.mkdir()
        return folder

    def _give_up(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process = None


def _done(process: subprocess.Popen[bytes], files: Sequence[Path], timeout: float, waiting: Callable[[], None]) -> bool:
    """Wait until all plans have answered or the process has ended; False once it takes longer than `timeout` over one."""
    since = told = time.monotonic()
    answered = 0
    while (now := time.monotonic()) - since < timeout:
        over = process.poll() is not None
        count = sum(file.exists() for file in files)
        if over or count == len(files):
            return True
        if count > answered:
            since, answered = now, count
        if now - told >= 1:
            told = now
            waiting()
        time.sleep(POLL)
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
