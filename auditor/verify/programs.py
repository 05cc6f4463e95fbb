"""What the process runs that verifies exported programs.

A job's file is a folder, a plan's program the file of its name in there.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..isolation.process import ieee
from ..recursion import deep
from ..score import Given
from .artefact import READY
from .lifetime import tasks
from .running import Answers, answers_of, failure_of
from .scorer import score_model
from .standing import Standing
from .worker import read_batches, write

SUFFIX = ".pt2"
"""What names of the files end with."""

Run = Callable[[Path, list[Any], Mapping[str, Any]], Answers | str]
Score = Callable[[Path, Mapping[str, Any], Mapping[str, Any]], Given | str]


def main() -> None:
    """Run what `torch.export.save` wrote."""
    serve(run_program, SUFFIX, score_program)


def serve(run: Run, suffix: str, score: Score | None = None) -> None:
    """For one job after the other, write what each program answers, or gives to the user's function, as soon as it has."""
    warnings.simplefilter("ignore")
    if (given := tasks()) is None:
        return
    folder, settings, jobs = given
    if (first := next(jobs, None)) is None or (batches := read_batches(folder, settings)) is None:
        return
    batches = pytree.tree_map_only(torch.Tensor, lambda x: x.to(settings["device"]), batches)
    (folder / READY).touch()
    for job in itertools.chain([first], jobs):
        asked = json.loads((job / "job.json").read_text(encoding="utf-8"))
        for index, plan in enumerate(asked["plans"]):
            file = Path(asked["file"], plan + suffix)
            if score is not None and "score" in asked:
                write(job, index, score(file, asked["score"], settings))
            else:
                write(job, index, run(file, batches, settings))


def run_program(file: Path, batches: list[Any], settings: Mapping[str, Any]) -> Answers | str:
    """What a saved program answers, or why it does not."""
    with deep(), ieee():
        try:
            module = torch.export.load(file).module().to(settings["device"])
        except Exception as error:
            return failure_of(error)
        return answers_of(
            module, batches, settings["device"], settings["seed"], settings["gradients"], settings["most"]
        )


def score_program(file: Path, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> Given | str:
    """What the user's function gives of a saved program in the model's place, or why it gives nothing."""

    def loaded() -> Standing:
        return Standing(torch.export.load(file).module().to(settings["device"]))

    return score_model(loaded, file.stem, asked, settings)
