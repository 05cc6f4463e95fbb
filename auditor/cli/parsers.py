"""The parsers of the command line: one a verb, whose options come from the settings or stand here."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..asked import LEVELS, Command, flag_of
from ..errors import AuditorError
from ..settings import bad, options_of
from . import audit, fleet, streams, verbs
from .endings import PROGRAM

DESCRIPTION = "Which layers of a PyTorch model can run in FP16 or BF16, which must stay FP32, why, and what it costs."
EPILOG = """\
TARGET is path/to/model.py[:symbol] or package.module[:symbol]; a symbol may take arguments: model.py:Net(width=8).
or timm:NAME, or hf:NAME_OR_PATH, where those packages are installed.
exit code: 0 clean, 1 findings at or above --fail-on or no plan within --max-drop, 2 error,
  130 interrupted
"""
PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""How shtab completes a path."""

PLAN = "a plan.json, or the directory of an audit"
Run = Callable[[argparse.Namespace], int]


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
            streams.say(message)
        else:
            super()._print_message(message, file)


def parser() -> Parser:
    """The whole command line, as `shtab --shell=bash --prog=auditor auditor.cli.parser` completes it."""
    return _made()[0]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """What the words ask. The verb, `audit` where none is named, may stand behind flags. Raises: AuditorError."""
    whole, parts = _made()
    actions = [action for part in parts.values() for action in part._actions]
    valued = {flag for action in actions if action.nargs is None for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in valued else 1
    if at >= len(words):
        return whole.parse_args(words)
    if words[at] in parts:
        return parts[words[at]].parse_args([*words[:at], *words[at + 1 :]])
    _refuse_misspelt(words[at], parts)
    return parts["audit"].parse_args(words)


def _refuse_misspelt(word: str, verbs: Collection[str]) -> None:
    """Raises: AuditorError(slug="missing-target") where a word is nearly a verb, and no file or module has that name."""
    close = difflib.get_close_matches(word, verbs, n=1, cutoff=0.75) if re.fullmatch(r"[a-z-]+", word) else []
    there = close and (Path(word).exists() or Path(f"{word}.py").exists())
    if close and not there and not (word.isidentifier() and importlib.util.find_spec(word)):
        raise AuditorError(f"no verb, file or module is called {word!r}: did you mean {close[0]}?", "missing-target")


def _made() -> tuple[Parser, dict[str, Parser]]:
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    whole = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EPILOG, **how)
    _add_options(whole, *(name for name, option in options_of(Command).items() if option.flag is not None))
    below = whole.add_subparsers(metavar="TARGET | VERB", required=True, parser_class=Parser)
    parts: dict[str, Parser] = {}
    for name, (run, said, fill) in VERBS.items():
        parts[name] = below.add_parser(name, help=said, description=said, epilog=EPILOG * (name == "audit"), **how)
        parts[name].set_defaults(run=run)
        fill(parts[name])
    parts["audit"].prog = PROGRAM
    return whole, parts


def _add_options(made: Parser, *names: str) -> None:
    """Options of the settings. One that is not given is not among what is parsed."""
    add = made.add_argument
    add("--version", action="version", version=f"auditor {__version__}", help="say which version this is, then stop")
    for name in (*names, *(() if "debug" in names else ("debug",))):
        option, field = options_of(Command)[name], Command.model_fields[name]
        about: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _plain(option.help, field.default)}
        flags = [flag_of(name)] if name != "quiet" else ["-q", flag_of(name)]
        if option.takes == "True or False":
            add(*flags, action=argparse.BooleanOptionalAction, **about)
            continue
        if option.choices is not None and not isinstance(field.default, tuple):
            about["choices"] = [*option.choices()]
        if name == "onnx":
            about |= {"nargs": "?", "const": "fp32"}
        made_here = add(
            *flags, action="append" if name == "criteria" else "store", metavar=option.shown or None, **about
        )
        if option.path:
            made_here.complete = PATHS  # type: ignore[attr-defined]


def _plain(help: str, default: Any) -> str:
    """Help without its marks, and the default."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", help).replace("`", "").replace("%", "%%")
    given = ",".join(default) if isinstance(default, tuple) else default
    return text if isinstance(default, bool) or given in (None, "") else f"{text} (default: {given})"


def _plan(made: Parser, name: str = "plan_file", shown: str = "PLAN", help: str = PLAN) -> None:
    made.add_argument(name, metavar=shown, type=Path, help=help).complete = PATHS  # type: ignore[attr-defined]


def _target(made: Parser) -> None:
    add = made.add_argument("target", metavar="TARGET", help="the file or module that holds the model")
    add.complete = PATHS  # type: ignore[attr-defined]


def _audit(made: Parser) -> None:
    _target(made)
    _add_options(made, *(name for name, option in options_of(Command).items() if option.flag is not None))


def _explain(made: Parser) -> None:
    made.add_argument(
        "code", metavar="CODE", help="a rule's code, such as SFT001, or the name of an error, such as bad-plan"
    )
    _add_options(made, "rules")


def _explain_layer(made: Parser) -> None:
    _plan(made)
    made.add_argument("name", metavar="NAME", help="a module path such as blocks.0.norm, or an operation's name")
    _add_options(made)


def _rules(made: Parser) -> None:
    made.add_argument("--format", choices=("text", "json", "md"), default="text", help="default: %(default)s")
    _add_options(made, "rules")


def _apply(made: Parser) -> None:
    _plan(made)
    _target(made)
    made.add_argument("--plan", metavar="NAME", help="which of its plans, default: the recommended one")
    _add_options(made, "inputs", "weights", "out", "timeout", "seed")


def _snippet(made: Parser) -> None:
    from ..snippets import TOOLS

    _plan(made)
    add = made.add_argument
    add("--for", dest="tool", choices=tuple(TOOLS), help="default: all of them")
    add("--plan", metavar="NAME", help="which of its plans, default: the recommended one, or its like for this tool")
    _add_options(made)


def _diff(made: Parser) -> None:
    _plan(made, "before", "A")
    _plan(made, "after", "B", "the one to compare with it")
    _plan(made, "--html", "FILE", "also write the comparison as one HTML file")
    made.add_argument(
        "--format", choices=("text", "json"), default="text", help="what stdout gets, default: %(default)s"
    )
    made.add_argument(
        "--fail-on", choices=LEVELS, default="never", help="exit with 1 if a finding this severe is new, default: never"
    )
    _add_options(made)


def _fleet(made: Parser) -> None:
    add = made.add_argument
    _plan(made, "targets", "TARGETS", "a TOML file of [[target]] tables: name, target, options of an audit")
    add("--out", metavar="DIR", type=Path, required=True, help="where the audits go, a folder each, and the page")
    add("--jobs", metavar="N", type=_count, help="audits at once; default: half of the processors")
    add("--timeout", metavar="SECONDS", type=float, help="for one audit, which fails beyond; default: none")
    add("--retries", metavar="N", type=_count, default=1, help="for one that a signal ended, default %(default)s")
    add("--force", action="store_true", help="also audit what was audited with the same options before")
    add("--baseline", metavar="DIR", type=Path, help="an earlier fleet: say what got worse since, and exit with 1")
    add("--address", metavar="ADDRESS", help="a Ray cluster that makes the audits (auto: the one this is part of)")
    _add_options(made, "quiet")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 4:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text[:20]!r}")
    return int(text)


VERBS: dict[str, tuple[Run, str, Callable[[Parser], None]]] = {
    "audit": (audit.audit, f"{DESCRIPTION} It needs no name: `{PROGRAM} TARGET`.", _audit),
    "explain": (
        verbs.explain,
        "What a rule looks for, why that hurts, what to do; or what an error is about.",
        _explain,
    ),
    "explain-layer": (
        verbs.explain_layer,
        "What each plan of an audit runs a module or operation in, and why not lower.",
        _explain_layer,
    ),
    "rules": (verbs.rules, "Every rule, one per line, or as one Markdown document.", _rules),
    "apply": (verbs.apply, f"Write {verbs.PATCHED} for TARGET, following a plan.json of an earlier audit.", _apply),
    "snippet": (verbs.snippet, "A plan as Python to paste, for another tool.", _snippet),
    "diff": (verbs.diff, "What changed from one audit to another: findings, verdicts, plans.", _diff),
    "fleet": (fleet.fleet, "Audit many models, each in a process of its own; DIR/index.html tells of all.", _fleet),
}
