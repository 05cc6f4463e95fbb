"""The emitted file in a process of its own: nothing of this one can help it to work, nor does it fall with it."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .. import offload
from ..devices import let_go
from ..errors import LoadError, MeasureError, first_line
from ..folder import own
from ..isolation.process import Flags
from ..numerics.metrics import output_error
from ..processes import Process, unwound
from ..records import Batch, Timed, Times
from ..score import Given, Scoring
from ..trees import tensors_in
from .failures import NOT_RUN, said_no_memory
from .lifetime import end, ended, hand, start
from .running import Answers, Told

TIMEOUT = 1800.0
"""Seconds after which a plan that has not answered is given up."""

POLL, GRACE = 0.02, 1.0
"""Seconds between two looks for answers, and those that the process has to end when there is nothing left to run."""

STARTED = "started.pt"
"""The file that says how far the process came: `failed`, what the user's code raised; `unread`, why there are no inputs; else
`answer`, what the model that was built there answers in FP32 on the first batch, where it was built."""

COUNTED = "counted"
"""The file that says of which plan the user's function gave how many numbers so far."""

ALIKE = 1e-3
"""Relative L2 difference up to which two FP32 answers are of one model: rounding is 1e-6, another initialisation is 1."""

REBUILD = "patched_model.py calls that code once more, in the same working directory: make that possible. No verdict"
"""What to say where the user's code fails before any plan is applied."""

LATER = 20.0
"""Seconds that a process has beyond a score's time to start, to build the model, and to say by itself that the time is over."""


class NotHandedOver(Exception):
    """The model that is audited, with its inputs, cannot be had in another process; the message says why."""


class Verifier:
    """Emitted files of one model, run in a process of its own that is there from the first until the body ends.

    A `patched_model.py` it imports by its path, as a user's script would, and runs its plans one after the other; the model
    is built for the first. Where a folder takes the file's place, it loads what lies there under a plan's name: an exported
    program or an ONNX model, see loaders.py. Where it dies or hangs, the plan that it was at has failed, and another process goes on with the rest.
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
        expected: Sequence[torch.Tensor] | None = None,
        noise: float = 0.0,
    ) -> None:
        """batches: they arrive on the devices that they are on. scratch: a folder that may go with this process, should it be killed.
        gradients, most: see Runs.
        timeout: seconds for a plan to answer, TIMEOUT unless given. expected: FP32 outputs for the first batch, which the model
        that is built in the process has to give as well, but for `noise`, what they differ by between runs."""
        self._scratch, self._timeout = scratch, timeout or TIMEOUT
        self._expected, self._limit = expected, max(ALIKE, 3 * noise)
        self._settings: dict[str, Any] = {
            "batches": str(scratch / "batches.pt"),
            "scratch": str(scratch),
            "seed": seed,
            "device": device,
            "gradients": gradients,
            "most": most,
            "memory": limit.size if (limit := offload.now()) else None,
            "places": [str(x.device) for x in tensors_in(list(batches))],
        }
        self._process: Process | None = None
        self._begun = 0
        try:
            torch.save(pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, list(batches)), self._settings["batches"])
        except Exception as error:
            said = f"the inputs cannot be pickled ({type(error).__name__}: {first_line(error)[:160]})"
            self._settings["unread"] = said

    @classmethod
    @contextmanager
    def begun(cls, batches: Sequence[Batch], **settings: Any) -> Iterator[tuple[Verifier, Path]]:
        """One with a folder of its own, and that folder, for the body. settings: as to make one. Raises: NotHandedOver."""
        with ExitStack() as held:
            held.enter_context(unwound())
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix=own(), ignore_cleanup_errors=True))
            yield held.enter_context(cls(list(batches), Path(folder), **settings)), Path(folder)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None and self._process is not None:
            ended(self._process, GRACE)
        self._give_up()

    def answers(
        self, patched_file: Path, plans: Sequence[str], waiting: Callable[[], None] = lambda: None
    ) -> dict[str, Answers | str]:
        """What each plan of a file answers on each batch, or the one-line reason why it does not.

        waiting: called every second. Raises: NotHandedOver where the inputs cannot be read in the other process.
        """
        return self._done(patched_file, plans, {}, self._timeout, waiting)

    def scores(
        self,
        patched_file: Path,
        plans: Sequence[str],
        scoring: Scoring,
        most: int | None = None,
        told: Told = lambda words: None,
    ) -> dict[str, Given | str]:
        """What the user's function gives under each plan, or the one-line reason why it gives nothing.

        plans: FP32 among them is the model itself. most: see `given_by`. told: called every second. Raises: NotHandedOver.
        """
        if scoring.place is None:
            raise NotHandedOver("the function that scores is in hand alone")
        file = self._scratch / COUNTED

        def waiting() -> None:
            told(file.read_text(encoding="utf-8") if file.exists() else "")

        file.unlink(missing_ok=True)
        asked = {"score": {"function": scoring.place.text, "most": most, "limit": self._timeout}}
        return self._done(patched_file, plans, asked, self._timeout + LATER, waiting)

    def times(
        self, patched_file: Path, plans: Sequence[str], flags: Flags, told: Told = lambda words: None
    ) -> dict[str, Timed | str]:
        """What one forward on the first batch takes under each plan, or the one-line reason why nothing was measured.

        plans: FP32 and TODAY among them are the model itself, the latter under `flags`. told: called every second. Raises: NotHandedOver.
        """
        asked = {"time": {"flags": dict(flags), "threads": torch.get_num_threads()}}
        return self._done(patched_file, plans, asked, self._timeout, lambda: told(""))

    def _done(
        self, file: Path, plans: Sequence[str], asked: Mapping[str, Any], timeout: float, waiting: Callable[[], None]
    ) -> dict[str, Any]:
        """What is asked of each plan; of one that the process did not survive, why, and another goes on with the rest."""
        found: dict[str, Any] = {}
        while left := [plan for plan in plans if plan not in found]:
            folder, known = self._numbered(), self._process
            files = [folder / f"{index}.pt" for index in range(len(left))]
            job = {"folder": str(folder), "file": str(file), "plans": left, **asked}
            try:
                failure = self._run(job, files, timeout, waiting)
                self._check_start(failure)
            except BaseException:
                self._give_up()
                raise
            answered = {plan: _read(each) for plan, each in zip(left, files, strict=True) if each.exists()}
            shutil.rmtree(folder, ignore_errors=True)
            if not answered and known is not None and self._process is None:
                continue  # it had ended since it answered others
            missing = [plan for plan in left if plan not in answered]
            found |= answered | dict.fromkeys(missing[:1], NOT_RUN + failure)
        return found

    def _check_start(self, failure: str) -> None:
        """Hold what was built in the process against what is audited.

        Raises: LoadError(slug="not-rebuilt") where the user's code did not build the model again, or it does not run in
        FP32; NotHandedOver where that is another model, or cannot be given its inputs.
        """
        if not (file := self._folder / STARTED).exists():
            said = f"the model could not be built in a fresh process: {failure}"
            raise LoadError(f"{said}. {REBUILD}", slug="not-rebuilt")
        started = torch.load(file, weights_only=True, mmap=True)
        if said := started.get("failed"):
            raise (
                torch.OutOfMemoryError(said) if said_no_memory(said) else LoadError(f"{said}. {REBUILD}", "not-rebuilt")
            )
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
            raise NotHandedOver("the factory makes another model each time: seed it, or give --weights")

    def _run(self, job: Mapping[str, Any], files: Sequence[Path], timeout: float, waiting: Callable[[], None]) -> str:
        """Have a job done; how the process ended, should it have left a plan without an answer."""
        let_go(self._settings["device"])  # the other process is to use it
        if (limit := offload.now()) is not None:
            limit.let_go()
        if self._process is None:
            self._folder = self._numbered()
            try:
                self._process = start()
            except OSError as error:
                return f"the process that runs patched_model.py could not be started: {error}"
            hand(self._process, {"folder": str(self._folder), **self._settings})
        process = self._process
        hand(process, job)
        if not _answered(process, files, timeout, waiting):
            self._give_up()
            return f"the process that ran it gave no answer within {timeout:g} seconds"
        if process.poll() is None:
            return ""
        failure = _ending(process)
        self._give_up()
        return failure

    def _numbered(self) -> Path:
        """A folder that there is not yet."""
        self._begun += 1
        folder = self._scratch / str(self._begun)
        folder.mkdir()
        return folder

    def _give_up(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process = None


def _read(file: Path) -> Any:
    """What was given of one plan, or the reason why nothing was."""
    try:
        with torch.serialization.safe_globals([Answers, Given, Timed, Times]):
            return torch.load(file, weights_only=True, mmap=True)  # read where it is compared
    except Exception as error:
        return f"its outputs cannot be read outside of its process: {first_line(error)[:200]}"


def _answered(process: Process, files: Sequence[Path], timeout: float, waiting: Callable[[], None]) -> bool:
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


def _ending(process: Process) -> str:
    """How a process ended, with the last line it wrote."""
    process.messages.seek(0)
    text = process.messages.read()[-4096:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    last = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in lines[-1].strip()) if lines else ""
    code = process.returncode
    how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code} and no answer"
    return f"the process that ran it {how}" + (f": {last[:300]}" if last else "")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
