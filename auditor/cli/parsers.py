"""The parsers of the command line: one a verb, whose options come from the settings or stand here."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..asked import LEVELS, OPTIONS, Command
from ..errors import AuditorError
from ..settings import bad
from ..snippets import TOOLS
from . import audit, fleet, verbs
from .program import PROGRAM, say

DESCRIPTION = "Which layers of a PyTorch model can run in FP16 or BF16, which must stay FP32, why, and what it costs."
EPILOG = """\
TARGET is path/to/model.py[:symbol] or package.module[:symbol]; a symbol may take arguments: model.py:Net(width=8).
or timm:NAME, or hf:NAME_OR_PATH, where those packages are installed.
exit code: 0 clean, 1 findings at or above --fail-on or no plan within --max-drop, 2 error,
  130 interrupted
"""
PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""How shtab completes a path."""

Argument = tuple[str, dict[str, Any]]
"""What `add_argument` takes."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and helps on standard output."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.encode("utf-8", "backslashreplace").decode("utf-8").split())
        raise bad(text + self._meant(message))

    def _meant(self, message: str) -> str:
        """What options that there are not were meant to be."""
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrec") else []
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        close = [found[0] for flag in flags if (found := difflib.get_close_matches(flag, known, n=1))]
        return f": did you mean {' and '.join(dict.fromkeys(close))}?" if close else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            say(message)
        else:
            super()._print_message(message, file)


def parser() -> Parser:
    """The whole command line, as `shtab --shell=bash --prog=auditor auditor.cli.parser` completes it."""
    return parsers()[0]


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and that of each verb."""
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    whole = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG, **how)
    _add_options(whole, *ALL)
    below = whole.add_subparsers(metavar="TARGET | VERB", required=True, parser_class=Parser)
    parts: dict[str, Parser] = {}
    for name, (run, said, arguments, options) in VERBS.items():
        made = parts[name] = below.add_parser(
            name, help=said, description=said, epilog=EPILOG * (name == "audit"), **how
        )
        made.set_defaults(run=run)
        for called, about in arguments:
            _add(made, about.get("type") is Path or called == "target", called, **about)
        _add_options(made, *options)
    parts["audit"].prog = PROGRAM
    return whole, parts


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """What the words ask. The verb, `audit` where none is named, may stand behind flags. Raises: AuditorError."""
    whole, parts = parsers()
    actions = [action for part in parts.values() for action in part._actions]
    valued = {flag for action in actions if action.nargs is None for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in valued else 1
    if at >= len(words):
        return whole.parse_args(words)
    if words[at] in parts:
        return parts[words[at]].parse_args([*words[:at], *words[at + 1 :]])
    _refuse_misspelt(words[at])
    return parts["audit"].parse_args(words)


def _refuse_misspelt(word: str) -> None:
    """Raises: AuditorError(slug="missing-target") where a word is nearly a verb, and no file or module has that name."""
    close = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.75) if re.fullmatch(r"[a-z-]+", word) else []
    there = close and (Path(word).exists() or Path(f"{word}.py").exists())
    if close and not there and not (word.isidentifier() and importlib.util.find_spec(word)):
        raise AuditorError(f"no verb, file or module is called {word!r}: did you mean {close[0]}?", "missing-target")


def _add(made: Parser, path: bool, *flags: str, **about: Any) -> None:
    action = made.add_argument(*flags, **about)
    if path:
        action.complete = PATHS  # type: ignore[attr-defined]


def _add_options(made: Parser, *names: str) -> None:
    """Options of the settings. One that is not given is not among what is parsed."""
    made.add_argument(
        "--version", action="version", version=f"auditor {__version__}", help="say which version this is, then stop"
    )
    for name in dict.fromkeys((*names, "debug")):
        option, default = OPTIONS[name], Command.model_fields[name].default
        help = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", option.help).replace("`", "").replace("%", "%%")
        given = ",".join(default) if isinstance(default, tuple) else default
        if not isinstance(default, bool) and given not in (None, ""):
            help += f" (default: {given})"
        about: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
        if option.takes == "True or False":
            about["action"] = argparse.BooleanOptionalAction
        else:
            about |= {"metavar": option.shown or None, "action": "append" if name == "criteria" else "store"}
        if option.choices is not None and not isinstance(default, tuple):
            about["choices"] = [*option.choices()]
        if name == "onnx":
            about |= {"nargs": "?", "const": "fp32"}
        _add(made, bool(option.path), *["-q"] * (name == "quiet"), str(option.flag), **about)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 4:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text[:20]!r}")
    return int(text)


def _argument(name: str, shown: str | None, help: str, **more: Any) -> Argument:
    return name, {"metavar": shown, "help": help, **more}


ALL = tuple(name for name, option in OPTIONS.items() if option.flag)
PLAN = _argument("plan_file", "PLAN", "a plan.json, or the directory of an audit", type=Path)
TARGET = _argument("target", "TARGET", "the file or module that holds the model")

VERBS: dict[str, tuple[Callable[[argparse.Namespace], int], str, list[Argument], Sequence[str]]] = {
    "audit": (audit.audit, f"{DESCRIPTION} It needs no name: `{PROGRAM} TARGET`.", [TARGET], ALL),
    "explain": (
        verbs.explain,
        "What a rule looks for, why that hurts, what to do; or what an error is about.",
        [_argument("code", "CODE", "a rule's code, such as SFT001, or the name of an error, such as bad-plan")],
        ["rules"],
    ),
    "explain-layer": (
        verbs.explain_layer,
        "What each plan of an audit runs a module or operation in, and why not lower.",
        [PLAN, _argument("name", "NAME", "a module path such as blocks.0.norm, or an operation's name")],
        [],
    ),
    "rules": (
        verbs.rules,
        "Every rule, one per line, or as one Markdown document.",
        [_argument("--format", None, "default: %(default)s", choices=("text", "json", "md"), default="text")],
        ["rules"],
    ),
    "apply": (
        verbs.apply,
        f"Write {verbs.PATCHED} for TARGET, following a plan.json of an earlier audit.",
        [PLAN, TARGET, _argument("--plan", "NAME", "which of its plans, default: the recommended one")],
        ["inputs", "weights", "out", "timeout", "seed"],
    ),
    "snippet": (
        verbs.snippet,
        "A plan as Python to paste, for another tool.",
        [
            PLAN,
            _argument("--for", None, "default: all of them", choices=tuple(TOOLS), dest="tool"),
            _argument("--plan", "NAME", "which plan, default: the recommended one, or its like for this tool"),
        ],
        [],
    ),
    "diff": (
        verbs.diff,
        "What changed from one audit to another: findings, verdicts, plans.",
        [
            _argument("before", "A", PLAN[1]["help"], type=Path),
            _argument("after", "B", "the one to compare with it", type=Path),
            _argument("--html", "FILE", "also write the comparison as one HTML file", type=Path),
            _argument(
                "--format", None, "what stdout gets, default: %(default)s", choices=("text", "json"), default="text"
            ),
            _argument(
                "--fail-on",
                None,
                "exit with 1 if a finding this severe is new, default: never",
                choices=LEVELS,
                default="never",
            ),
        ],
        [],
    ),
    "fleet": (
        fleet.fleet,
        "Audit many models, each in a process of its own; DIR/index.html tells of all.",
        [
            _argument(
                "targets", "TARGETS", "a TOML file of [[target]] tables: name, target, options of an audit", type=Path
            ),
            _argument("--out", "DIR", "where the audits go, a folder each, and the page", type=Path, required=True),
            _argument("--jobs", "N", "audits at once; default: half of the processors", type=_count),
            _argument("--timeout", "SECONDS", "for one audit, which fails beyond; default: none", type=float),
            _argument("--retries", "N", "of one that a signal ended; default: 1", type=_count, default=1),
            ("--force", {"action": "store_true", "help": "also audit what was audited with the same options before"}),
            _argument("--baseline", "DIR", "an earlier fleet: say what got worse since, and exit with 1", type=Path),
            _argument("--address", "ADDRESS", "a Ray cluster that makes the audits (auto: the one this is in)"),
        ],
        ["quiet"],
    ),
}
