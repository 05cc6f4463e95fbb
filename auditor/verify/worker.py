"""What the verification process runs: see lifetime.py for how it is started."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .. import mapped
from ..devices import is_native, is_spread
from ..loading.placement import sent
from ..loading.sandbox import blame
from ..loading.state import materialise, switch
from ..ops.remembered import Products
from ..raised import out_of_memory
from ..records import Batch, Timed
from ..recursion import deep
from ..runs.answer import answer
from ..score import Given
from ..state.draws import reseed
from ..state.flags import under
from ..state.ieee import ieee
from ..state.restored import restored
from .artefact import FAILED, READY, SAME, UNREAD
from .lifetime import tasks
from .offloading import answers_under
from .running import Answers, answers_of, failure_of
from .scorer import score_plan
from .scores import FP32
from .timing import TODAY, timed


def main() -> None:
    """Build the model once, and for one job after the other write what each plan answers as soon as it has."""
    sys.dont_write_bytecode = True  # nothing of an audit stays in the user's folders
    warnings.simplefilter("ignore")
    if (given := tasks()) is None:
        return
    folder, settings, jobs = given
    if (first := next(jobs, None)) is not None:
        with mapped.limited(settings.get("memory")):
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
    """The model and the batches, once it has run on the first one in FP32; None where that cannot be, which is written down."""
    asked = json.loads((job / "job.json").read_text(encoding="utf-8"))
    sys.argv = [asked["file"]]  # a source that looks at its arguments finds none
    what = "building the model"
    try:
        patched = import_file(asked["file"])
        model = built(patched, settings)
        if (batches := read_batches(folder, settings)) is None:
            return None
        materialise(model, batches[0], settings["seed"])
        what = "running the model in FP32"
        with deep(), ieee():
            found = answers_under(model, partial(_in_fp32, patched), partial(_once, batches[0], settings["seed"]))
        if isinstance(found, str):
            raise RuntimeError(found)
        torch.save(found.outputs[0], folder / SAME)
    except (Exception, SystemExit) as error:
        said = failure_of(error) if out_of_memory(error) else blame(error)
        text = f"{what} in a fresh process raised {said}"
        (folder / FAILED).write_text(text, encoding="utf-8")
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


def _in_fp32(patched: ModuleType, model: nn.Module) -> None:
    """Raise what the model stores low, as the audited one was."""
    if FP32 in patched.PLANS:
        patched.apply(model, FP32)


def _once(batch: Batch, seed: int, model: nn.Module) -> Answers:
    return Answers([[x.cpu() for x in answer(model, batch, seed=seed)]])


def built(patched: ModuleType, settings: Mapping[str, Any]) -> nn.Module:
    """The model as its source makes it, with the random numbers that it was audited with."""
    reseed(settings["seed"])
    with patched.imported(patched.SOURCE, patched.__file__):
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
