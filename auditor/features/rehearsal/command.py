"""The verb `rehearse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...command.output import say
from ...command.verb import WithTarget
from ...document import read
from ...progress.shown import Display
from ...records import folder
from ...settings import Flag, Option


class Rehearse(WithTarget):
    """Run a training step a few hundred times in several recipes (FP32, autocast, BF16 weights); recommend one."""

    takes = (
        "target",
        "steps",
        "batches",
        "plan_file",
        "remedies",
        "recipes",
        "ranks",
        "out",
        "timeout",
        "seed",
        "quiet",
    )
    examples = (
        ("rehearse train.py:step", "200 steps of train.step, in FP32 and in every recipe"),
        ("rehearse train.py:step --steps 1000 --plan audits/model", "more steps, and the plan of an audit too"),
    )
    stages: ClassVar = ("load", "rehearse")
    target: Annotated[str, Option(shown="FILE.py[:STEP]", path="place")]
    """a function that runs one training step on a batch, a LightningModule or a Trainer of transformers; by default the
    only one in FILE.py"""
    steps: Annotated[int, Field(ge=1, lt=1_000_000), Option("a whole number from 1 to 999999", "N")] = 200
    """number of training steps in each recipe"""
    batches: Annotated[str | None, Option(shown="NAME", path="place")] = None
    """the batches for the training step: `f.py:name`, or a name in FILE.py; by default `batches`, `get_batches()`,
    `train_loader` or another loader in FILE.py, or `get_inputs()`"""
    plan_file: Annotated[Path | None, Option("the path of a plan.json", "PLAN", flag="--plan", path="path")] = None
    """the plan.json or directory of an audit. An autocast plan of the audit is rehearsed too: the recommended plan if it
    uses autocast, else the BF16 plan, else the FP16 plan"""
    remedies: Flag = True
    """if a recipe has a problem, also run variants of the recipe, each with a fix"""
    recipes: Annotated[str, Option("names, separated by commas", "NAMES")] = ""
    """further recipes to run: `stochastic_rounding`, `kahan_sums` (weights in BF16), `bf16_state` (Adam's moments in BF16),
    `ranks` (BF16 gradients of simulated ranks, summed in FP32 and in BF16), or `all`"""
    ranks: Annotated[int, Field(ge=2, le=1024), Option("a whole number from 2 to 1024", "N")] = 8
    """number of simulated ranks of `--recipes ranks`; each gets a part of the rows of every batch"""

    def run(self, progress: Display) -> None:
        """Run a training step in several recipes; write the result and print it."""
        from ...loading.target import parse
        from ...report import blocks
        from . import rehearse
        from .facade import Rehearsal
        from .load import load_step
        from .page import overview

        plan = read.load(self.plan_file) if self.plan_file else None
        directory = self.out or Path("audits") / f"{parse(self.target).name}-rehearsal"
        folder.check_directory(directory)
        with load_step(self.target, self.batches, self.seed) as (step, batches, name):
            names = [name.strip() for name in self.recipes.split(",") if name.strip()]
            how: dict[str, Any] = {"remedies": self.remedies, "recipes": names, "ranks": self.ranks}
            how |= {"progress": progress, "target": name}
            result = rehearse.rehearse(step, batches, self.steps, plan=plan, seed=self.seed, **how)
        files = Rehearsal.of(result).save(directory)
        progress.close()
        say(blocks.to_terminal(overview(result)) + f"Report   {files[-1]}\nFiles    {files[0]}\n")


VERBS = (Rehearse,)
