"""The verb `snippet`: print a plan as code for another tool."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import streams
from .verbs import parser


def snippet_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    from ..snippets import TOOLS

    made = parser("snippet", "A plan as Python to paste: " + ", ".join(tool.title for tool in TOOLS.values()) + ".")
    add = made.add_argument
    add("plan_file", metavar="PLAN", type=Path, help="a plan.json, or the directory of an audit")
    add("--for", dest="tool", metavar="TOOL", choices=tuple(TOOLS), help=f"{', '.join(TOOLS)}; default: all of them")
    add("--plan", metavar="NAME", help="which of its plans, default: the recommended one, or its like for this tool")
    return made


def snippet(args: argparse.Namespace) -> int:
    """Print the snippet. Raises: PlanError."""
    from ..snippets import snippet as written
    from ..snippets import snippets

    texts = (
        [written(args.plan_file, args.tool, args.plan)] if args.tool else snippets(args.plan_file, args.plan).values()
    )
    streams.say("\n\n".join(texts))
    return 0
