"""Entry point of the process that runs exported programs: `python -m auditor.verify.programs FOLDER`.

A job's file is a folder, a plan's program the file of its name in there.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..recursion import deep
from ..state.ieee import ieee
from .artefact import READY, UNREAD
from .lifetime import end_with_parent
from .running import Answers, answers_of, failure_of
from .worker import write

SUFFIX = ".pt2"
"""What names of the files end with."""

Run = Callable[[Path, list[Any], dict[str, Any]], Answers | str]


def main(folder: Path) -> None:
    """Run what `torch.export.save` wrote."""
    serve(folder, run_program, SUFFIX)


def serve(folder: Path, run: Run, suffix: str) -> None:
    """For one job after the other, write what each program answers as soon as it has."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    jobs = map(Path, end_with_parent(Path(settings["scratch"])))
    warnings.simplefilter("ignore")
    first = next(jobs, None)
    if first is None:
        return
    try:
        batches = torch.load(settings["batches"], weights_only=False)  # written by the parent process a moment ago
    except Exception:
        (folder / UNREAD).touch()
        return
    batches = pytree.tree_map_only(torch.Tensor, lambda x: x.to(settings["device"]), batches)
    (folder / READY).touch()
    for job in itertools.chain([first], jobs):
        asked = json.loads((job / "job.json").read_text(encoding="utf-8"))
        for index, plan in enumerate(asked["plans"]):
            write(job, index, run(Path(asked["file"], plan + suffix), batches, settings))


def run_program(file: Path, batches: list[Any], settings: dict[str, Any]) -> Answers | str:
    """What a saved program answers, or why it does not."""
    with deep(), ieee():
        try:
            module = torch.export.load(file).module().to(settings["device"])
        except Exception as error:
            return failure_of(error)
        return answers_of(
            module, batches, settings["device"], settings["seed"], settings["gradients"], settings["most"]
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
