"""Entry point of the verification process: `python -m auditor.verify.worker FOLDER`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import mapped
from ..devices import is_native, is_spread
from ..loading.placement import sent
from ..loading.state import materialise, switch
from ..mapped.freeing import keep_freed
from ..ops.remembered import Products
from ..records import Batch, Timed
from ..recursion import deep
from ..score import Given
from ..state.draws import reseed
from ..state.flags import under
from ..state.ieee import ieee
from ..state.restored import restored
from .artefact import READY, UNREAD
from .lifetime import end_with_parent
from .offloading import answers_under
from .running import Answers, answers_of, failure_of
from .scorer import score_plan
from .scores import FP32
from .timing import TODAY, timed


def main(folder: Path) -> None:
    """Build the model once, and for one job after the other write what each plan answers as soon as it has."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    jobs = map(Path, end_with_parent(Path(settings["scratch"])))
    warnings.simplefilter("ignore")
    first = next(jobs, None)
    if first is not None:
        with mapped.limited(settings.get("memory")):
            if mapped.now() is None:
                keep_freed()
            _work(folder, first, jobs, settings)


def _work(folder: Path, first: Path, jobs: Iterator[Path], settings: Mapping[str, Any]) -> None:
    """All jobs, on one model."""
    started = start(folder, first, settings)
    if started is None:
        return
    model, batches = started
    if (limit := mapped.now()) is not None:
        limit.loaded()
    (folder / READY).touch()
    for job in itertools.chain([first], jobs):
        _do(job, model, batches, settings)


def _do(job: Path, model: nn.Module, batches: list[Batch], settings: Mapping[str, Any]) -> None:
    """One job: what each of its plans answers, is scored or takes."""
    asked = json.loads((job / "job.json").read_text(encoding="utf-8"))
    patched, known, last = import_file(asked["file"]), Products(), len(asked["plans"]) - 1
    for index, plan in enumerate(asked["plans"]):
        if "time" in asked:
            write(job, index, time_plan(patched, model, plan, batches[0], settings, asked["time"]))
        elif "score" in asked:
            write(job, index, score_plan(patched, model, plan, asked["score"], settings))
        else:
            write(job, index, run_plan(patched, model, plan, batches, settings, known, index == last))


def start(folder: Path, job: Path, settings: Mapping[str, Any]) -> tuple[nn.Module, list[Batch]] | None:
    """The model and the batches; None where they are not to be had, which is written down."""
    asked = json.loads((job / "job.json").read_text(encoding="utf-8"))
    sys.argv = [asked["file"]]  # a source that looks at its arguments finds none
    try:
        model = built(import_file(asked["file"]), settings)
    except Exception as error:
        for index in range(len(asked["plans"])):
            write(job, index, failure_of(error))
        return None
    try:
        batches = torch.load(settings["batches"], weights_only=False)  # written by the parent process a moment ago
    except Exception:
        (folder / UNREAD).touch()
        return None
    places = iter(settings["places"])
    batches = pytree.tree_map_only(torch.Tensor, lambda x: x.to(next(places)), batches)
    materialise(model, batches[0], settings["seed"])
    return model, batches


def built(patched: ModuleType, settings: Mapping[str, Any]) -> nn.Module:
    """The model as its source makes it, with the random numbers that it was audited with."""
    reseed(settings["seed"])
    patched.source_module(patched.SOURCE, patched.__file__)
    reseed(settings["seed"])
    with mapped.in_this_thread():
        model: nn.Module = patched.original()
    switch(model, training=False)
    device = settings["device"]
    return sent(model, device) if is_native(device) and not is_spread(device) else model


def run_plan(
    patched: ModuleType,
    model: nn.Module,
    plan: str,
    batches: list[Batch],
    settings: Mapping[str, Any],
    known: Products | None = None,
    last: bool = True,
) -> Answers | str:
    """What the model answers under one plan, or why it does not; it is then as it was. known, last: see `answers_of`."""

    def run(model: nn.Module) -> Answers | str:
        asked = {name: settings[name] for name in ("device", "seed", "gradients", "most", "alike")}
        return answers_of(model, batches, **asked, known=known, last=last)

    with deep(), ieee():
        return answers_under(model, lambda model: patched.apply(model, plan), run)


def time_plan(
    patched: ModuleType,
    model: nn.Module,
    plan: str,
    batch: Batch,
    settings: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> Timed | str:
    """What one forward takes under one plan, or in FP32, which as TODAY is that of the caller's flags; see `run_plan`."""
    torch.set_num_threads(asked["threads"])
    flags = under(asked["flags"]) if plan == TODAY else ieee()
    with deep(), flags, restored(model):
        try:
            applied = FP32 if plan == TODAY else plan
            if applied in patched.PLANS:
                patched.apply(model, applied)
        except Exception as error:
            return failure_of(error)
        return timed(model, batch, settings["device"], seed=settings["seed"])


def write(folder: Path, index: int, answer: Answers | Given | Timed | str) -> None:
    """What one plan answers, in a file that is there as a whole or not at all."""
    content = {"failure": answer} if isinstance(answer, str) else as_plain(answer)
    unfinished = folder / "unfinished"
    torch.save(content, unfinished)
    unfinished.replace(folder / f"{index}.pt")


def as_plain(answer: Answers | Given | Timed) -> dict[str, Any]:
    """What is needed to make it again."""
    return asdict(answer) if isinstance(answer, Timed) else vars(answer)


def import_file(path: str) -> ModuleType:
    """`patched_model`, imported from wherever it lies."""
    spec = importlib.util.spec_from_file_location("patched_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["patched_model"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(Path(sys.argv[1]))
