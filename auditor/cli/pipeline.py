"""Audits every component of a pipeline in turn. Importing this file imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ..command.output import say
from ..command.verb import PROGRAM, WithTarget
from ..document import read
from ..errors import AuditorError, printable
from ..loading.doors import parts_of
from ..settings import bad

READABLE = ("text", "md", "github")
"""Formats of a result that may follow one another on stdout."""


def audit_pipeline(settings: WithTarget, audit_one: Callable[[WithTarget], int]) -> int | None:
    """Audit the components that a pipeline calls, each into a folder of its own, and list the plans at the end.

    audit_one: audits the component that the settings name, and returns its exit code. Returns the highest exit code;
    None if the target is no pipeline. If the audit of one component fails, the others go on. Raises: LoadError for a
    pipeline that does not run; AuditorError(slug="bad-option").
    """
    parts = parts_of(settings.target, settings.inputs, settings.seed)
    if not parts:
        return None
    if settings.format not in READABLE:
        raise bad(
            f"--format {settings.format} is for one model, and a pipeline has several: name one component, {next(iter(parts.values()))}"
        )
    name = Path(settings.target.removeprefix("hf:")).resolve().name
    directory = settings.out or Path("audits") / name
    codes, lines = list[int](), list[str]()
    for part, target in parts.items():
        out = directory / part
        baseline = settings.baseline / part if settings.baseline else None
        own = settings.model_copy(update={"target": target, "out": out, "baseline": baseline})
        try:
            codes.append(audit_one(own))
        except AuditorError as error:
            codes.append(2)
            print(f"error: {target}: {printable(str(error))}", file=sys.stderr)
            lines.append(f"{part}: failed, {error.slug}")
            continue
        if not settings.dry_run:
            plan = read.load(out).recommended or "FP32"
            lines.append(f"{part}: {plan}, in {out}")
    if lines:
        plans = "".join(f"  {line}\n" for line in lines)
        hint = f"{PROGRAM} snippet {directory / next(iter(parts))} --for diffusers"
        say(f"\nPipeline {name}\n{printable_lines(plans)}Use it   {hint}\n")
    return max(codes)


def printable_lines(text: str) -> str:
    """`printable` for each line of a text."""
    return "".join(f"{printable(line)}\n" for line in text.splitlines())
