"""Entry point of the process that runs exported programs: `python -m auditor.verify.programs FOLDER`.

A job's file is a folder, a plan's program the file of its name in there.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..recursion import deep
from ..score import Given
from ..state.ieee import ieee
from .artefact import READY, UNREAD
from .lifetime import end_with_parent
from .running import Answers, answers_of, failure_of
from .scorer import score_model
from .standing import Standing
from .worker import write

SUFFIX = ".pt2"
"""What names of the files end with."""

Run = Callable[[Path, list[Any], dict[str, Any]], Answers | str]
Score = Callable[[Path, dict[str, Any], dict[str, Any]], Given | str]


def main(folder: Path) -> None:
    """Run what `torch.export.save` wrote."""
    serve(folder, run_program, SUFFIX, score_program)


def serve(folder: Path, run: Run, suffix: str, score: Score | None = None) -> None:
    """For one job after the other, write what each program answers, or gives to the user's function, as soon as it has."""
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
            file = Path(asked["file"], plan + suffix)
            if score is not None and "score" in asked:
                write(job, index, score(file, asked["score"], settings))
            else:
                write(job, index, run(file, batches, settings))


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


def score_program(file: Path, asked: Mapping[str, Any], settings: Mapping[str, Any]) -> Given | str:
    """What the user's function gives of a saved program in the model's place, or why it gives nothing."""

    def loaded() -> Standing:
        return Standing(torch.export.load(file).module().to(settings["device"]))

    return score_model(loaded, file.stem, asked, settings)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
