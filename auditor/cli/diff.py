"""The verb `diff`: what changed between two audits of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import folder
from . import streams
from .verbs import parser

if TYPE_CHECKING:
    from ..document.compare import Comparison

LEVELS = ("error", "warning", "info", "never")


def diff_parser() -> argparse.ArgumentParser:
    made = parser("diff", "What changed from one audit to another: findings, verdicts, plans.")
    add = made.add_argument
    add("before", metavar="A", type=Path, help="a plan.json, or the directory of an audit")
    add("after", metavar="B", type=Path, help="the one to compare with it")
    add("--html", metavar="FILE", type=Path, help="also write the comparison as one HTML file")
    add("--format", choices=("text", "json"), default="text", help="what stdout gets, default: %(default)s")
    add(
        "--fail-on", choices=LEVELS, default="never", help="exit with 1 if a finding this severe is new, default: never"
    )
    return made


def diff(args: argparse.Namespace) -> int:
    """Print the comparison. Raises: PlanError where either file cannot be read, AuditorError(slug="bad-output")."""
    from ..document.compare import LEVELS as RISING
    from ..document.compare import compare
    from ..document.read import load

    found = compare(load(args.before), load(args.after))
    files = str(args.before), str(args.after)
    if args.html:
        from ..report import diff

        folder.check_file(args.html)
        folder.write(args.html.parent, {args.html.name: diff.render(found, files)})
    if args.format == "json":
        streams.say(json.dumps(_as_data(found, files), indent=1) + "\n")
    else:
        from ..report.blocks import looks, to_terminal
        from ..report.diff import overview

        streams.say(to_terminal(overview(found, files), looks()))
        streams.say(f"Report   {args.html}\n" if args.html else "")
    if args.fail_on == "never":
        return 0
    return int(any(RISING.index(f.severity) >= RISING.index(args.fail_on) for f in found.new))


def _as_data(found: Comparison, files: tuple[str, str]) -> dict[str, Any]:
    from pydantic import TypeAdapter

    from ..document.compare import Comparison

    data = TypeAdapter(Comparison).dump_python(found, mode="json", exclude={"before", "after"})
    before, after = (
        {"file": file, "name": side.subject.name, "recommended": side.recommended}
        for file, side in zip(files, (found.before, found.after), strict=True)
    )
    return {"before": before, "after": after, **data, "kept": found.kept}
