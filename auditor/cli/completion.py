"""The verb `completion`: a script that completes the command `auditor` in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from .verbs import parser

SHELLS = ("bash", "zsh", "tcsh")
FILES = ("--rules", "--out", "--weights", "--baseline", "--html", "PLAN", "A", "B", "TARGET")
"""Options and arguments that are completed with paths."""


def completion_parser() -> argparse.ArgumentParser:
    made = parser(
        "completion", "A script that completes the command `auditor`; your shell's manual says where it goes."
    )
    made.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" | ".join(SHELLS))
    return made


def script(shell: str, verbs: Mapping[str, Callable[[], argparse.ArgumentParser]]) -> str:
    """The script for one shell, made from the parsers themselves; an audit's options also complete without its verb."""
    import shtab

    whole = verbs["audit"]()
    whole.prog = "auditor"
    for action in [a for a in whole._actions if not a.option_strings]:
        whole._remove_action(action)
    below = whole.add_subparsers()
    for name, make in verbs.items():
        made = make()
        _complete_paths(made)
        below.add_parser(name, parents=[made], add_help=False, help=made.description)
    _complete_paths(whole)
    return str(shtab.complete(whole, shell))


def _complete_paths(made: argparse.ArgumentParser) -> None:
    import shtab

    for action in made._actions:
        if action.metavar in FILES or set(action.option_strings) & set(FILES):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
