"""The verification process: runs jobs that artefact.py sends, with the models that loaders.py loads."""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import offload
from ..errors import out_of_memory
from ..isolation.isolated import switch
from ..isolation.members import enter_by
from ..isolation.process import ieee, reseed
from ..isolation.run_model import run_model
from ..loading.importer import import_source
from ..loading.placement import copy_to_device
from ..loading.state import materialise
from ..loading.target import blame
from ..numerics.devices import is_gpu, is_spread, on_target
from ..numerics.entries import over_tensors
from ..processes import outlive_parent
from ..records import Batch
from ..stages import Stages
from .artefact import COUNTED, STARTED
from .loaders import load_program, patch_model
from .running import FP32, Load, ModelRuns, failure_of


def main() -> None:
    """Run jobs in turn, and write the result of each plan as soon as it is ready."""
    sys.dont_write_bytecode = True  # an audit leaves no files in the user's folders
    warnings.simplefilter("ignore")
    handed = jobs()
    if (settings := next(handed, None)) is not None:
        outlive_parent()  # to delete the folder `scratch`
        with offload.resident_limit(settings["memory"]), on_target(settings["device"]):
            worker = Worker(settings)
            while (job := next(handed, None)) is not None and worker.did(job):
                pass


def jobs() -> Iterator[Any]:
    """Yield the messages to this process, in order: first the settings, which include `scratch`.

    The process ends, and deletes the folder `scratch`, once the other end of its standard input is closed. The user's
    code reads an empty standard input.
    """
    pipe, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    handed: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def watch() -> None:
        scratch: list[Path] = []
        with os.fdopen(pipe, "rb") as lines, suppress(EOFError):
            while True:
                job = pickle.load(lines)
                scratch = scratch or [job["scratch"]]
                handed.put(job)
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return iter(handed.get, None)


class Worker:
    """Runs jobs in this process. model, batches: None until a job needs them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.model: nn.Module | None = None
        self.batches: list[Batch] | None = None

    def did(self, job: Mapping[str, Any]) -> bool:
        """Run a job, and save the result of each plan in the job; return False if no plan can run."""
        settings, folder = self.settings, job["folder"]
        load, failure = self._load_plans(job["file"])
        write(folder / STARTED, failure)
        if load is None or self.batches is None:
            return False
        how = {name: settings[name] for name in ("device", "seed", "gradients", "most", "fused")}
        runs = ModelRuns(load, self.batches, **how, apart=True)
        stages = Stages(lambda stage, detail, *_: self._tell(detail))
        for index, plan in enumerate(job["plans"]):
            with stages(plan, ""):
                write(folder / f"{index}.pt", job["question"](runs, plan))
        return True

    def _tell(self, words: str) -> None:
        (self.settings["scratch"] / COUNTED).write_text(words, encoding="utf-8")

    def _load_plans(self, file: Path) -> tuple[Load | None, dict[str, Any]]:
        """The loader for the plans of a file, and the contents of STARTED."""
        if file.is_dir():
            return partial(load_program, file, self.settings["device"]), self._read()
        what = "building the model"
        try:
            if self.model is not None:
                module = import_source("patched_model", file)
                return partial(patch_model, self.model, module.PLANS, module.apply), {}
            sys.argv = [str(file)]  # the user's code must see no arguments
            module = import_source("patched_model", file)
            model = build_model(module, self.settings)
            if (
                unread := self._read()
            ) or self.batches is None:  # read now: inputs may be of classes in the model's file
                return None, unread
            materialise(model, self.batches[0], self.settings["seed"])
            what, self.model = "running the model in FP32", model
            load = partial(patch_model, model, module.PLANS, module.apply)
            with ieee(), load(FP32):
                result = run_model(model, self.batches[0], seed=self.settings["seed"])
                return load, {"answer": [x.cpu() for x in result]}
        except (Exception, SystemExit) as error:
            failure = failure_of(error) if out_of_memory(error) else blame(error)
            return None, {"failed": f"{what} in a fresh process raised {failure}"}

    def _read(self) -> dict[str, str]:
        """Move the inputs to their devices; returns the reason if they cannot be read."""
        if "unread" in self.settings or self.batches is not None:
            return {"unread": self.settings["unread"]} if self.batches is None else {}
        try:
            batches = torch.load(self.settings["batches"], weights_only=False)  # the parent process has written them
            places = iter(self.settings["places"])
            self.batches = over_tensors(lambda x: x.to(next(places)), batches)
        except Exception as error:
            return {"unread": f"the inputs cannot be loaded in another process ({failure_of(error)})"}
        return {}


def build_model(module: ModuleType, settings: Mapping[str, Any]) -> nn.Module:
    """Build the model from its source, with the audit's random numbers."""
    reseed(settings["seed"])
    with module.user_module(module.SOURCE, module.__file__):
        reseed(settings["seed"])
    model: nn.Module = module.original()
    if method := module.SOURCE.get("method"):
        enter_by(model, method)
    offload.onto(model)
    switch(model, training=False)
    device = settings["device"]
    return copy_to_device(model, device) if is_gpu(device) and not is_spread(device) else model


def write(file: Path, content: Any) -> None:
    """Save `content` with torch.save; the file appears under its name only when it is complete."""
    unfinished = file.with_name("unfinished")
    torch.save(content, unfinished)
    unfinished.replace(file)
