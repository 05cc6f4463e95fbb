"""Runs patched models in a separate process, which lacks the audit's state, and whose crash does not end the audit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .. import offload
from ..errors import LoadError, MeasureError, describe, first_line, printable
from ..numerics.devices import free_device_memory
from ..numerics.entries import over_tensors, tensors_in
from ..numerics.metrics import output_error
from ..processes import HERE, Process, how_ended, wait_until
from ..records import Batch, TimeAndMemory, Times
from ..records.folder import OWN
from ..score import ScoreResult
from ..stages import beat
from .running import NOT_RUN, Answers, ModelRuns, Question, said_no_memory

TIMEOUT = 1800.0
"""Seconds after which a plan without a result counts as failed."""

GRACE = 1.0
"""Seconds that the verification process may take to end once all jobs are done."""

STARTED = "started.pt"
"""The file that the verification process writes at the start of a job. `failed`: the exception of the user's code;
`unread`: why inputs could not be read; `answer`: FP32 outputs for the first batch, if this job built the model."""

COUNTED = "counted"
"""The file to which the verification process writes the progress of a plan."""

ALIKE = 1e-3
"""Largest relative L2 difference between FP32 outputs of equal models: rounding gives 1e-6, other weights give 1."""

REBUILD = "patched_model.py runs your code again in the same directory: make the code repeatable. No plan was verified"
"""Text added to the error message if the user's code fails before any plan is applied."""

LATER = 20.0
"""Seconds added to a score's time limit, for starting, building the model and reporting the timeout itself."""

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from auditor.processes import end_with
end_with(int(sys.argv.pop()))
from auditor.verify.worker import main
main()
"""
"""Code that the verification process runs: `python -m` would put the working directory in sys.path, and run the package
as `__main__`."""

_standby: Process | None = None


def start() -> Process:
    """Start worker.py with the working directory, `sys.path`, environment and interpreter flags of this process.
    Raises: OSError."""
    global _standby
    process, _standby = _standby, None
    if process is not None and process.poll() is None:
        return process
    path = [str(Path(folder).absolute()) for folder in sys.path]
    words = json.dumps([*path, *([] if HERE in path else [HERE])])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return Process([sys.executable, *flags, "-c", _BOOT, str(os.getpid()), words], stdin=subprocess.PIPE)


@contextmanager
def standby() -> Iterator[None]:
    """In the `with` block, the process for the first `start()` exists already and imports its modules."""
    global _standby
    with suppress(OSError):
        _standby = start()
    try:
        yield
    finally:
        process, _standby = _standby, None
        if process is not None:
            process.end()


def hand(process: Process, job: Any) -> None:
    """Send a job to a process; does nothing if the process has ended."""
    assert process.stdin is not None
    with suppress(OSError):
        pickle.dump(job, process.stdin)
        process.stdin.flush()


class NotHandedOver(Exception):
    """The audited model or its inputs cannot be used in another process; the message gives the reason."""


class Verifier:
    """Runs one model's patched_model.py and exported programs in a separate process, which ends with the `with` block.

    The process imports `patched_model.py` by its path, as a user's script would, builds the model for the first plan,
    and runs the plans in turn. If `ask` gets a folder instead, the process loads the file with the plan's name: an
    exported program or an ONNX model, see loaders.py. If the process crashes or hangs, the current plan has failed, and
    another process runs the remaining plans.
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
        fused: bool = False,
        timeout: float | None = None,
        expected: Sequence[torch.Tensor] | None = None,
        noise: float = 0.0,
    ) -> None:
        """batches: inputs on the devices to use. scratch: a folder that is deleted if this process is killed.
        gradients: whether to run with gradients too. most: maximum number of operations of a forward. fused: see ModelRuns. timeout: seconds
        for a plan, default TIMEOUT. expected: FP32 outputs for the first batch, which the model built in the process
        must reproduce up to ALIKE or three times `noise`, the difference between FP32 runs."""
        self.scratch, self.timeout = scratch, timeout or TIMEOUT
        self._expected, self._limit = expected, max(ALIKE, 3 * noise)
        self._settings: dict[str, Any] = {
            "batches": scratch / "batches.pt",
            "scratch": scratch,
            "seed": seed,
            "device": device,
            "gradients": gradients,
            "most": most,
            "fused": fused,
            "memory": limit.size if (limit := offload.now()) else None,
            "places": [str(x.device) for x in tensors_in(list(batches))],
        }
        self._process: Process | None = None
        self._jobs = 0
        try:
            torch.save(over_tensors(torch.Tensor.cpu, list(batches)), self._settings["batches"])
        except Exception as error:
            message = f"the inputs cannot be pickled ({describe(error)})"
            self._settings["unread"] = message

    @classmethod
    @contextmanager
    def start(cls, batches: Sequence[Batch], **settings: Any) -> Iterator[tuple[Verifier, Path]]:
        """Yields a Verifier and a temporary folder for its files. settings: arguments of the constructor."""
        with (
            tempfile.TemporaryDirectory(prefix=OWN, ignore_cleanup_errors=True) as folder,
            cls(batches, Path(folder), **settings) as verifier,
        ):
            yield verifier, Path(folder)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None and self._process is not None:
            hand(self._process, None)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self._give_up()

    def ask(
        self,
        file: Path,
        plans: Sequence[str],
        question: Question = ModelRuns.answers,
        later: float = 0.0,
    ) -> dict[str, Any]:
        """{plan: result of `question`, or in one line why the plan failed}. The names FP32 and TODAY mean the model
        without a plan.

        later: seconds added to the timeout. Raises: NotHandedOver; LoadError(slug="not-rebuilt");
        torch.OutOfMemoryError.
        """
        result: dict[str, Any] = {}
        (self.scratch / COUNTED).unlink(missing_ok=True)
        while left := [plan for plan in plans if plan not in result]:
            self._jobs += 1
            folder, known = self.scratch / str(self._jobs), self._process
            folder.mkdir()
            files = [folder / f"{index}.pt" for index in range(len(left))]
            job = {"folder": folder, "file": file, "plans": left, "question": question}
            try:
                failure = self._run(job, files, self.timeout + later)
                if known is not None and self._process is None and not (folder / STARTED).exists():
                    continue  # the process had ended after an earlier job: start another
                self._check_start(folder / STARTED, failure)
            except BaseException:
                self._give_up()
                raise
            answered = {plan: read(each) for plan, each in zip(left, files, strict=True) if each.exists()}
            shutil.rmtree(folder, ignore_errors=True)
            missing = [plan for plan in left if plan not in answered]
            result |= answered | dict.fromkeys(missing[:1], NOT_RUN + failure)  # another process runs the rest
        return result

    def _check_start(self, file: Path, failure: str) -> None:
        """Compare the model built in the process with the audited one.

        Raises: LoadError(slug="not-rebuilt") if the user's code does not build the model again, or the model does not
        run in FP32; torch.OutOfMemoryError if that process ran out of memory; NotHandedOver if it built another model,
        or cannot get the inputs.
        """
        if not file.exists():
            message = f"the model could not be built in a fresh process: {failure}"
            raise LoadError(f"{message}. {REBUILD}", slug="not-rebuilt")
        started = torch.load(file, weights_only=True, mmap=True)
        if message := started.get("failed"):
            if said_no_memory(message):
                raise torch.OutOfMemoryError(message)
            raise LoadError(f"{message}. {REBUILD}", "not-rebuilt")
        if "unread" in started:
            raise NotHandedOver(started["unread"])
        if self._expected is None or "answer" not in started:
            return
        expected, self._expected = [x.cpu() for x in self._expected], None
        try:
            difference = output_error(expected, started["answer"])
        except MeasureError:
            difference = float("inf")
        if not difference <= self._limit:
            raise NotHandedOver("the factory returns a different model each time: seed the factory, or give --weights")

    def _run(self, job: Mapping[str, Any], files: Sequence[Path], timeout: float) -> str:
        """Run a job; returns how the process ended if it left a plan without a result.

        The process is stopped if one plan takes longer than `timeout`.
        """
        free_device_memory(self._settings["device"])  # frees memory for the other process
        if (limit := offload.now()) is not None:
            limit.drop_mapped_files()
        if self._process is None:
            try:
                self._process = start()
            except OSError as error:
                return f"the process that runs patched_model.py could not be started: {error}"
            hand(self._process, self._settings)
        process = self._process
        hand(process, job)
        counted = self.scratch / COUNTED

        def count_answers() -> int:
            beat(counted.read_text(encoding="utf-8") if counted.exists() else "")
            return sum(file.exists() for file in files)

        if not wait_until(lambda: process.poll() is not None or count_answers() == len(files), timeout, count_answers):
            self._give_up()
            return f"the process that ran the plan did not respond within {timeout:g} seconds"
        if count_answers() == len(files):
            return ""
        last = printable("".join(process.last_words()[-1:]).strip())
        silent = " without a result" if process.returncode >= 0 else ""
        self._give_up()
        ended = f"the process that ran the plan {how_ended(process.returncode)}{silent}"
        return f"{ended}: {last[:300]}" if last else ended

    def _give_up(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None


def read(file: Path) -> Any:
    """Read a plan's result from its file; the reason as text if that fails."""
    try:
        with torch.serialization.safe_globals([Answers, ScoreResult, TimeAndMemory, Times]):
            return torch.load(file, weights_only=True, mmap=True)  # mapped: read when compared
    except Exception as error:
        return f"the plan's outputs cannot be passed between processes: {first_line(error)[:200]}"
