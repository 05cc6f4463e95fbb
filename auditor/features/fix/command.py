"""The verb `fix`."""

from __future__ import annotations

from typing import ClassVar

from ...command.output import say
from ...command.verb import WithTarget
from ...progress.shown import Display
from ...settings import Flag


class Fix(WithTarget):
    """Search for changes of your source that repair what an audit finds: print a diff of those that were run, audited and
    found to gain, and write fixes.patch beside the report."""

    takes = (
        "target",
        "apply",
        "safe",
        "inputs",
        "weights",
        "formats",
        "strategies",
        "max_error",
        "criteria",
        "use",
        "gpu",
        "objective",
        "device",
        "memory",
        "rules",
        "out",
        "timeout",
        "seed",
        "quiet",
    )
    examples = (
        ("fix model.py", "print a verified diff, and write fixes.patch"),
        ("fix model.py --apply", "also write the changes into your files"),
        ("fix model.py --safe", "only conversions of dtypes, no algebra"),
        ("fix train.py:step", "a training step: its loss, and the order of its calls"),
    )
    stages: ClassVar = ("load", "audit", "fix")
    apply: Flag = False
    """write the changes into your files; by default no file of yours changes"""
    safe: Flag = False
    """only try changes that convert dtypes; no rewriting of the algebra"""

    def run(self, progress: Display) -> int:
        """Audit the target, search for fixes, write the report and the patch, and print the diff."""
        from .steps import is_step

        if is_step(self.target):
            return self._fix_step(progress)
        return self._fix_model(progress)

    def _fix_model(self, progress: Display) -> int:
        from dataclasses import replace

        from ... import flow, results
        from ...document import read
        from ...loading import load
        from ...records import folder
        from ...report import blocks, fixes
        from . import output
        from .search import find_fixes
        from .source import base_of

        self.rulebook  # noqa: B018 - rejects invalid rules
        subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
        directory = self.out or read.default_directory(subject)
        settings = self.model_copy(update={"progress": progress})
        audit = flow.run(subject, settings)
        found = find_fixes(audit, settings, only_safe=self.safe, tell=lambda words: progress("fix", words, 0, 0))
        files = results.Audit.of(replace(audit, fixed=found)).save(directory)
        patch, _ = folder.write(directory, output.texts_of(found))
        written = output.apply_fixes(found) if self.apply else ()
        progress.close()
        say(blocks.to_terminal(fixes.overview(found, subject.name)))
        say(f"\n{found.patch}\n" if found.patch else "")
        say(f"Report   {files[0]}\n")
        say(f"Patch    {patch}\n" if found.patch else "")
        say("".join(f"Written  {file}\n" for file in written))
        if found.fixes and not self.apply:
            folder_of_patch = base_of([one.file for one in found.texts])
            other = f"in {folder_of_patch}: git apply {patch.absolute()}"
            say(f"Next     --apply writes these changes into your files; or, {other}\n")
        return 0

    def _fix_step(self, progress: Display) -> int:
        from pathlib import Path

        from ...loading.target import parse
        from ...records import folder
        from ...report import blocks, fixes
        from . import output
        from .steps import fix_step

        name = parse(self.target).name
        directory = self.out or Path("audits") / f"{name}-fix"
        found = fix_step(self.target, self.seed, tell=lambda words: progress("fix", words, 0, 0))
        patch, _ = folder.write(directory, output.texts_of(found))
        written = output.apply_fixes(found) if self.apply else ()
        progress.close()
        say(blocks.to_terminal([block for block in fixes.step_overview(found, name) if block]))
        say(f"\n{found.patch}\n" if found.patch else "")
        say(f"Patch    {patch}\n" if found.patch else "")
        say("".join(f"Written  {file}\n" for file in written))
        return 0


VERBS = (Fix,)
