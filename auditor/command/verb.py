"""What every verb is, and what verbs share. Importing this file does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

from pydantic import Field

from ..asked import LEVELS, Command
from ..progress.shown import Display
from ..records import Finding
from ..settings import Option

PROGRAM = "python -m auditor"

TextOrJson = Annotated[str, Option(choices=lambda: ("text", "json")), Field(description="format of the output")]


class Verb(Command):
    """A command and its arguments. takes: names of its arguments, in the order of the help; some are options of
    `audit`. examples: (words after the program's name, what they do), for the help."""

    takes: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[tuple[str, str], ...]] = ()

    def run(self, progress: Display) -> int | None:
        """Run the command and return its exit code; None: 0. Raises: AuditorError."""
        raise NotImplementedError


class WithTarget(Verb):
    """A command that imports torch and loads the user's code. stage: its first stage."""

    stage: ClassVar[str] = "load"
    target: Annotated[str, Option(shown="TARGET", path="place")]
    """the model's file or module, such as model.py:Net"""


def severe(findings: Iterable[Finding], level: str) -> int:
    """Exit code 1 if any finding reaches the given severity, else 0."""
    return int(any(LEVELS.index(finding.severity) <= LEVELS.index(level) for finding in findings) and level != "never")
