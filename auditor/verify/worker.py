"""What the verification process runs: see lifetime.py for how it is started, loaders.py for what it can run."""

from __future__ import annotations

import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import offload as mapped
from ..devices import is_native, is_spread
from ..isolation.answer import answer
from ..isolation.process import ieee, reseed
from ..loading.placement import sent
from ..loading.sandbox import blame
from ..loading.state import materialise, switch
from ..raised import out_of_memory
from ..records import Batch, Timed
from ..recursion import deep
from ..score import Given, Unscored, named
from .artefact import COUNTED, FAILED, READY, SAME, UNREAD
from .failures import failure_of
from .lifetime import tasks
from .loaders import import_file, patched, saved
from .running import FP32, Answers, Runs, counted

QUIET = 0.5
"""Seconds between two words of how far the user's function is."""


def main() -> None:
    """For one job after the other write what each of its plans answers, gives or takes, as soon as it has."""
    sys.dont_write_bytecode = True  # nothing of an audit stays in the user's folders
    warnings.simplefilter("ignore")
    if (given := tasks()) is None:
        return
    folder, settings, jobs = given
    if (first := next(jobs, None)) is None:
        return
    with mapped.limited(settings["memory"]):
        if (started := start(folder, Path(_asked(first)["file"]), settings)) is None:
            return
        if (limit := mapped.now()) is not None:
            limit.loaded()
        (folder / READY).touch()
        do(first, *started, settings)
        for job in jobs:
            do(job, *started, settings)


def start(folder: Path, file: Path, settings: Mapping[str, Any]) -> tuple[nn.Module | None, list[Batch]] | None:
    """The batches and, for a `patched_model.py`, the model, once it has run on the first of them in FP32.

    None where that cannot be, which is written down.
    """
    if file.is_dir():
        batches = read_batches(folder, settings)
        on_device = partial(torch.Tensor.to, device=settings["device"])
        return None if batches is None else (None, pytree.tree_map_only(torch.Tensor, on_device, batches))
    sys.argv = [str(file)]  # a source that looks at its arguments finds none
    what = "building the model"
    try:
        module = import_file(str(file))
        model = built(module, settings)
        if (batches := read_batches(folder, settings)) is None:
            return None
        materialise(model, batches[0], settings["seed"])
        what = "running the model in FP32"
        with deep(), ieee(), patched(module, model, FP32):
            torch.save([x.cpu() for x in answer(model, batches[0], seed=settings["seed"])], folder / SAME)
    except (Exception, SystemExit) as error:
        said = failure_of(error) if out_of_memory(error) else blame(error)
        (folder / FAILED).write_text(f"{what} in a fresh process raised {said}", encoding="utf-8")
        return None
    return model, batches


def read_batches(folder: Path, settings: Mapping[str, Any]) -> list[Batch] | None:
    """The inputs, on the devices that they came from; None where they cannot be read here, which is written down."""
    reason = settings.get("unread")
    if reason is None:
        try:
            batches = torch.load(settings["batches"], weights_only=False)  # written by the parent process a moment ago
            places = iter(settings["places"])
            return pytree.tree_map_only(torch.Tensor, lambda x: x.to(next(places)), batches)  # type: ignore[no-any-return]
        except Exception as error:
            reason = f"the inputs cannot be read in another process ({failure_of(error)})"
    (folder / UNREAD).write_text(reason, encoding="utf-8")
    return None


def built(module: ModuleType, settings: Mapping[str, Any]) -> nn.Module:
    """The model as its source makes it, with the random numbers that it was audited with."""
    reseed(settings["seed"])
    with module.imported(module.SOURCE, module.__file__):
        reseed(settings["seed"])
    with mapped.in_this_thread():
        model: nn.Module = module.original()
    switch(model, training=False)
    device = settings["device"]
    return sent(model, device) if is_native(device) and not is_spread(device) else model


def do(job: Path, model: nn.Module | None, batches: list[Batch], settings: Mapping[str, Any]) -> None:
    """One job: what each of its plans answers, is scored or takes."""
    asked, device = _asked(job), settings["device"]
    file = Path(asked["file"])
    load = partial(saved, file, device) if model is None else partial(patched, import_file(str(file)), model)
    runs = Runs(load, batches, device, settings["seed"], settings["gradients"], settings["most"])
    for index, plan in enumerate(asked["plans"]):
        if (timing := asked.get("time")) is not None:
            torch.set_num_threads(timing["threads"])
            write(job, index, runs.time(plan, timing["flags"], apart=True))
        elif (scoring := asked.get("score")) is not None:
            write(job, index, score(runs, plan, scoring, settings))
        else:
            write(job, index, runs.answers(plan))


def score(runs: Runs, plan: str, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> Given | str:
    """What the user's function gives of the model under a plan, or why it gives nothing."""
    limit = asked["limit"]
    try:
        with deep(), _ended_after(limit):
            scoring = named(asked["function"], seed=runs.seed)
            return runs.score(plan, scoring, asked["most"], limit, _teller(plan, Path(settings["scratch"])))
    except Exception as error:
        return str(error) if isinstance(error, Unscored) else failure_of(error)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Whatever the body is at, it ends with Unscored; where the system has no timers, whoever waits ends the process."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Unscored(f"the function gave no score within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _teller(plan: str, scratch: Path) -> Callable[[int], None]:
    """Writes down how far the function is, for whoever shows it."""
    last = 0.0

    def tell(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > QUIET:
            last = time.monotonic()
            (scratch / COUNTED).write_text(counted(plan, count), encoding="utf-8")

    return tell


def write(folder: Path, index: int, answer: Answers | Given | Timed | str) -> None:
    """What one plan answers, in a file that is there as a whole or not at all."""
    plain = (
        asdict(answer)
        if isinstance(answer, Timed)
        else {"failure": answer}
        if isinstance(answer, str)
        else vars(answer)
    )
    unfinished = folder / "unfinished"
    torch.save(plain, unfinished)
    unfinished.replace(folder / f"{index}.pt")


def _asked(job: Path) -> Any:
    return json.loads((job / "job.json").read_text(encoding="utf-8"))
