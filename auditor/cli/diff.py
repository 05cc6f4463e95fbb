"""The verb `diff`: what changed between two audits of a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from .. import folder
from . import streams
from .verbs import parser

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
    from ..document.compare import compare
    from ..document.compared import LEVELS as RISING
    from ..document.compared import read

    found = compare(read(args.before), read(args.after))
    if args.html:
        from ..report import diff

        folder.check_file(args.html)
        folder.write(args.html.parent, {args.html.name: diff.render(found)})
    if args.format == "json":
        streams.say(json.dumps({**dataclasses.asdict(found), "kept": found.kept}, indent=1) + "\n")
    else:
        from ..report.blocks import looks, to_terminal
        from ..report.diff import overview

        streams.say(to_terminal(overview(found), looks()))
        streams.say(f"Report   {args.html}\n" if args.html else "")
    if args.fail_on == "never":
        return 0
    return int(any(RISING.index(f.severity) >= RISING.index(args.fail_on) for f in found.new))
