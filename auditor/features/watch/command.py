"""The verb `replay`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ...command.output import say
from ...command.verb import WithTarget
from ...errors import LoadError
from ...progress.shown import Display
from ...records import folder
from ...settings import Option

if TYPE_CHECKING:
    from .capsule import About


class Replay(WithTarget):
    """Replay a capsule of `auditor.watch` on a CPU: what failed in that training step, where, and what repairs it."""

    takes = ("capsule", "target", "out", "timeout", "seed", "quiet")
    examples = (
        ("replay capsules/step-000120-loss-not-finite", "with the step that the capsule names"),
        ("replay capsules/step-000120-loss-not-finite train.py:step", "with the step in another place"),
    )
    stages: ClassVar = ("load", "replay")
    capsule: Annotated[Path, Option("the path of a capsule", shown="CAPSULE", path="path")]
    """a folder that `auditor.watch` wrote"""
    target: Annotated[str, Option(shown="FILE.py:STEP", flag="", path="place")] = ""
    """the training step, a LightningModule, a Trainer, or the model if the step was not watched; by default the
    step that the capsule names"""

    def run(self, progress: Display) -> None:
        """Replay the capsule's step; write the result and print it."""
        from ...api import audit
        from ...emulation.emulate import scaled_as_on_cuda
        from ...emulation.regions import written_as_meant
        from ...loading.target import call, import_target, named_in, parse, user_code
        from ...report.blocks import to_terminal
        from ..rehearsal.loops import find_step, with_trainer
        from . import capsule as files
        from . import page
        from .recorder import inert_recorders
        from .replay import replay

        about = files.read_about(self.capsule)
        text = self.target or _target_of(about, self.capsule)
        target = parse(text)
        if not target.words and target.path is not None:
            target = replace(target, words=_words_of(about, target.path))
        directory = self.out or Path("audits") / f"{self.capsule.resolve().name}-replay"
        folder.check_directory(directory)
        with user_code(target, self.seed), written_as_meant(), scaled_as_on_cuda(), inert_recorders() as recorders:
            module = import_target(target)
            if target.symbol is None:
                target = replace(target, symbol=find_step(module, target.label, text))
            value: Any = named_in(target, "name the training step, as in train.py:step", "missing-target", self.seed)
            if target.text.endswith(")"):
                value = call(value, target.text, "bad-step", *target.args, **target.kwargs)
            value = with_trainer(value, module)
            result = replay(self.capsule, value, text, recorders, audit, progress)
        texts = {
            "replay.json": json.dumps(result.to_dict(), indent=1) + "\n",
            "replay.html": page.render(result),
        }
        written = folder.write(directory, texts)
        progress.close()
        say(to_terminal(page.overview(result)) + f"Report   {written[-1]}\nFiles    {written[0]}\n")


def _target_of(about: About, capsule: Path) -> str:
    """The step that a capsule names. Raises: LoadError(slug="bad-capsule") without one that exists here."""
    advice = "name the training step, as in: replay CAPSULE train.py:step"
    if about.code is None:
        raise LoadError(f"the capsule does not name a training step: {advice}", "bad-capsule")
    if not about.code.target:
        said = f"the step {about.code.name} is defined inside another function, and cannot be imported"
        raise LoadError(
            f"{said}: move it to the top of its file, or name a function that returns it, as in train.py:build()",
            "bad-capsule",
        )
    own = Path(about.code.file)
    folder = capsule.resolve().parent
    places = (own, Path(own.name), folder / own.name, folder.parent / own.name)  # on another machine, near the capsule
    found = next((one for one in places if one.is_file()), None)
    if found is None:
        raise LoadError(f"{own}, which contains the step, does not exist here: {advice}", "bad-capsule")
    return f"{found}:{about.code.name}"


def _words_of(about: About, file: Path) -> tuple[str, ...]:
    """The command-line arguments that the training gave to the same script."""
    command = about.command
    is_same = bool(command) and Path(command[0]).name == file.name
    return tuple(command[1:]) if is_same else ()


VERBS = (Replay,)
