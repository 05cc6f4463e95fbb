"""The verb `rehearse`: runs the user's training step in every recipe and compares each recipe with FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from .. import folder
from ..progress.shown import Display, reporter
from ..settings import Flag, Option
from .program import Verb, behind_the_result, say, watch

BATCHES = ("batches", "get_batches", "train_loader", "loader")


class Rehearse(Verb):
    """Run a training step a few hundred times in each recipe (FP32, autocast, BF16), and recommend a recipe."""

    takes = ("target", "steps", "batches", "plan_file", "remedies", "out", "timeout", "seed", "quiet")
    target: Annotated[
        str, Option(shown="FILE.py:STEP"), Field(description="a function that runs one training step on a batch")
    ]
    steps: Annotated[int, Field(ge=1, lt=1_000_000), Option("a whole number", "N")] = 200
    """number of training steps in each recipe"""
    batches: Annotated[str | None, Option(shown="NAME", path="place")] = None
    """arguments of the training step: `f.py:name`, or a name in the target's file; by default the file's `batches`,
    `get_batches()`, `train_loader` or `loader`"""
    plan_file: Annotated[Path | None, Option("the path of a plan.json", "PLAN", flag="--plan", path="path")] = None
    """the plan.json or directory of an audit; its plan is rehearsed too"""
    remedies: Flag = True
    """if a recipe has a problem, also run repaired variants of the recipe"""

    def run(self) -> int:
        return watch(self, self._rehearse, reporter(self.quiet))

    def _rehearse(self, progress: Display) -> int:
        progress("load", self.target, 0, 0)
        from ..document.read import load
        from ..loading.target import named_in, parse, user_code
        from ..rehearsal.rehearse import rehearse
        from ..report.blocks import looks, to_terminal
        from ..report.rehearsal import overview

        target = parse(self.target)
        plan = load(self.plan_file) if self.plan_file else None
        directory = self.out or Path("audits") / f"{target.name}-rehearsal"
        folder.check_directory(directory)
        with behind_the_result(self.debug), user_code(target, self.seed):
            advice = "name the function that runs one training step, as train.py:step"
            step, batches = named_in(target, advice, "missing-target", self.seed), self._batches(target)
            how: dict[str, Any] = {"remedies": self.remedies, "progress": progress, "target": self.target}
            result = rehearse(step, batches, self.steps, plan=plan, seed=self.seed, **how)
        files = result.save(directory)
        progress.close()
        say(to_terminal(overview(result), looks()) + f"Report   {files[-1]}\nFiles    {files[0]}\n")
        return 0

    def _batches(self, target: Any) -> Any:
        """The batches for the step; None where the file has none of the conventional names and no option names one."""
        from dataclasses import replace

        from ..errors import LoadError
        from ..loading.target import call, named_in, parse

        names = (self.batches,) if self.batches else BATCHES
        for name in names:
            where = parse(name) if ":" in name else replace(target, symbol=name)
            try:
                value = named_in(where, "give --batches file.py:name", "missing-inputs", self.seed)
            except LoadError as error:
                if self.batches or error.slug != "missing-inputs":
                    raise
                continue
            return call(value, f"{name}()", "bad-inputs") if callable(value) else value
        return None
