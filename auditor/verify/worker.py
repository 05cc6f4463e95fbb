"""What the verification process runs: see lifetime.py for how it is started, loaders.py for what it can run."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import offload
from ..devices import is_native, is_spread
from ..isolation.answer import answer
from ..isolation.process import ieee, reseed
from ..loading.placement import sent
from ..loading.sandbox import blame
from ..loading.state import materialise, switch
from ..raised import out_of_memory
from ..records import Batch
from ..recursion import deep
from ..score import Given, named
from .artefact import COUNTED, STARTED
from .failures import failure_of
from .lifetime import jobs
from .loaders import import_file, patched, saved
from .running import FP32, Runs, counted

QUIET = 0.5
"""Seconds between two words of how far the user's function is."""


def main() -> None:
    """For one job after the other write what each of its plans answers, gives or takes, as soon as it has."""
    sys.dont_write_bytecode = True  # nothing of an audit stays in the user's folders
    warnings.simplefilter("ignore")
    handed = jobs()
    if (settings := next(handed, None)) is None:
        return
    first = next(handed)
    with offload.limited(settings["memory"]):
        model, batches, said = start(Path(first["file"]), settings)
        write(Path(settings["folder"], STARTED), said)
        if batches is None:
            return
        if (limit := offload.now()) is not None:
            limit.loaded()
        for job in chain([first], handed):
            do(job, model, batches, settings)


Started = tuple[nn.Module | None, list[Batch] | None, dict[str, Any]]
"""The model of a `patched_model.py`, the batches, and what STARTED is to hold; no batches: nothing can be run."""


def start(file: Path, settings: Mapping[str, Any]) -> Started:
    """Build the model where there is one, read the batches, and run it on the first of them in FP32."""
    if file.is_dir():
        try:
            return None, read_batches(settings, settings["device"]), {}
        except NotRead as error:
            return None, None, {"unread": str(error)}
    sys.argv = [str(file)]  # a source that looks at its arguments finds none
    what = "building the model"
    try:
        module = import_file(str(file))
        model = built(module, settings)
        batches = read_batches(settings)
        materialise(model, batches[0], settings["seed"])
        what = "running the model in FP32"
        with deep(), ieee(), patched(module, model, FP32):
            found = [x.cpu() for x in answer(model, batches[0], seed=settings["seed"])]
    except NotRead as error:
        return None, None, {"unread": str(error)}
    except (Exception, SystemExit) as error:
        said = failure_of(error) if out_of_memory(error) else blame(error)
        return None, None, {"failed": f"{what} in a fresh process raised {said}"}
    return model, batches, {"answer": found}


class NotRead(Exception):
    """The inputs cannot be read here; the message says why."""


def read_batches(settings: Mapping[str, Any], device: str | None = None) -> list[Batch]:
    """The inputs, on one device, or on those that they came from. Raises: NotRead."""
    if (reason := settings.get("unread")) is not None:
        raise NotRead(reason)
    try:
        batches = torch.load(settings["batches"], weights_only=False)  # written by the parent process a moment ago
        places = iter(settings["places"])
        return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device or next(places)), batches)  # type: ignore[no-any-return]
    except Exception as error:
        raise NotRead(f"the inputs cannot be read in another process ({failure_of(error)})") from error


def built(module: ModuleType, settings: Mapping[str, Any]) -> nn.Module:
    """The model as its source makes it, with the random numbers that it was audited with."""
    reseed(settings["seed"])
    with module.imported(module.SOURCE, module.__file__):
        reseed(settings["seed"])
    with offload.in_this_thread():
        model: nn.Module = module.original()
    switch(model, training=False)
    device = settings["device"]
    return sent(model, device) if is_native(device) and not is_spread(device) else model


def do(job: Mapping[str, Any], model: nn.Module | None, batches: list[Batch], settings: Mapping[str, Any]) -> None:
    """One job: what each of its plans answers, is scored or takes."""
    file, device = Path(job["file"]), settings["device"]
    load = partial(saved, file, device) if model is None else partial(patched, import_file(str(file)), model)
    runs = Runs(load, batches, device, settings["seed"], settings["gradients"], settings["most"])
    for index, plan in enumerate(job["plans"]):
        if (timing := job.get("time")) is not None:
            torch.set_num_threads(timing["threads"])
            found: Any = runs.time(plan, timing["flags"], apart=True)
        elif (scoring := job.get("score")) is not None:
            found = score(runs, plan, scoring, Path(settings["scratch"]))
        else:
            found = runs.answers(plan)
        write(Path(job["folder"], f"{index}.pt"), found)


def score(runs: Runs, plan: str, asked: Mapping[str, Any], scratch: Path) -> Given | str:
    """What the user's function gives of the model under a plan, or why it gives nothing."""
    try:
        with deep():
            scoring = named(asked["function"], seed=runs.seed)
    except Exception as error:
        return failure_of(error)
    return runs.score(plan, scoring, asked["most"], asked["limit"], _teller(plan, scratch))


def _teller(plan: str, scratch: Path) -> Callable[[int], None]:
    """Writes down how far the function is, for whoever shows it."""
    last = 0.0

    def tell(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > QUIET:
            last = time.monotonic()
            (scratch / COUNTED).write_text(counted(plan, count), encoding="utf-8")

    return tell


def write(file: Path, content: Any) -> None:
    """A file that is there as a whole or not at all."""
    unfinished = file.with_name("unfinished")
    torch.save(content, unfinished)
    unfinished.replace(file)
