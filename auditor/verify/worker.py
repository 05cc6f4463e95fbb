"""Entry point of the verification process: `python -m auditor.verify.worker FOLDER`."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..loading.state import materialise, switch
from ..records import Batch
from ..recursion import deep
from ..state.draws import reseed
from ..state.restored import restored
from .artefact import READY, UNREAD
from .lifetime import end_with_parent
from .running import Answers, answers_of, failure_of


def main(folder: Path) -> None:
    """Read the job in `folder`, build the model once, and write what each plan answers as soon as it has."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    end_with_parent(Path(job["scratch"]))
    warnings.simplefilter("ignore")
    sys.argv = [job["file"]]  # a source that looks at its arguments finds none
    try:
        patched, model = built(job)
    except Exception as error:
        for index in range(len(job["plans"])):
            write(folder, index, failure_of(error))
        return
    try:
        batches = torch.load(job["batches"], weights_only=False)  # written by the parent process a moment ago
    except Exception:
        (folder / UNREAD).touch()
        return
    batches = pytree.tree_map_only(torch.Tensor, lambda x: x.to(job["device"]), batches)
    materialise(model, batches[0], job["seed"])
    (folder / READY).touch()
    for index, plan in enumerate(job["plans"]):
        write(folder, index, run_plan(patched, model, plan, batches, job))


def built(job: Mapping[str, Any]) -> tuple[ModuleType, nn.Module]:
    """`patched_model`, and the model as its source makes it, with the random numbers that it was audited with."""
    patched = import_file(job["file"])
    reseed(job["seed"])
    patched.source_module(patched.SOURCE, patched.__file__)
    reseed(job["seed"])
    model: nn.Module = patched.original()
    switch(model, training=False)
    return patched, model if job["device"] == "cpu" else model.to(job["device"])


def run_plan(
    patched: ModuleType, model: nn.Module, plan: str, batches: list[Batch], job: Mapping[str, Any]
) -> Answers | str:
    """What the model answers under one plan, or why it does not; it is then as it was."""
    with deep(), restored(model):
        try:
            patched.apply(model, plan)
        except Exception as error:
            return failure_of(error)
        return answers_of(model, batches, job["device"], job["seed"], job["gradients"], job["most"])


def write(folder: Path, index: int, answer: Answers | str) -> None:
    """What one plan answers, in a file that is there as a whole or not at all."""
    content = {"failure": answer} if isinstance(answer, str) else vars(answer)
    unfinished = folder / "unfinished"
    torch.save(content, unfinished)
    unfinished.replace(folder / f"{index}.pt")


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
