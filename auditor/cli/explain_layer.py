"""The verb `explain-layer`: why a module or operation does not run low, from the files of an audit."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
    from ..document.read import loaded, read_document
    from ..report.layer import explain_layer as in_words

    document = read_document(loaded(args.plan_file), str(args.plan_file))
    streams.say(in_words(document.plans, document.recommended, _owners(args.plan_file, document), args.name))
    return 0


def _owners(given: Path, document: object) -> Mapping[str, str]:
    """{operation: its module}, from measurements.json where that lies beside the plan."""
    from ..document.parts import MEASUREMENTS
    from ..document.read import loaded, read_measurements

    beside = (given if given.is_dir() else given.parent) / MEASUREMENTS
    if not beside.is_file():
        return {}
    return {node.name: node.owner for node in read_measurements(loaded(beside), str(beside), document).nodes}
