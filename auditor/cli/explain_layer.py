"""The verb `explain-layer`: why a module or operation does not run low, from the files of an audit."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import streams
from .verbs import parser


def explain_layer_parser() -> argparse.ArgumentParser:
    """Options of the verb."""
    made = parser("explain-layer", "What each plan of an audit runs a module or operation in, and why not lower.")
    made.add_argument("plan_file", metavar="PLAN", type=Path, help="a plan.json, or the directory of an audit")
    made.add_argument("name", metavar="NAME", help="a module path such as blocks.0.norm, or an operation's name")
    return made


def explain_layer(args: argparse.Namespace) -> int:
    """Print it. Raises: PlanError; AuditorError(slug="no-such-layer")."""
    from ..document.read import load
    from ..report.layer import explain_layer as in_words

    audit = load(args.plan_file)
    owners = {report.node.name: report.node.owner for report in audit.nodes}
    streams.say(in_words(audit.plans, audit.recommended, owners, args.name))
    return 0
