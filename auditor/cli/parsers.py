"""The argument parsers: a parser for each verb, built from the verb's declared options."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..asked import command_of
from ..errors import AuditorError
from ..settings import bad, options_of, with_flags
from .audit import AuditTarget
from .program import PROGRAM, Verb
from .verbs import Apply, Diff, Explain, ExplainLayer, Fleet, Ledger, Rehearse, Rules, Snippet

EPILOG = """\
TARGET is path/to/model.py[:symbol] or package.module[:symbol]; a symbol may take arguments: model.py:Net(width=8).
TARGET can also be timm:NAME or hf:NAME_OR_PATH, if timm or transformers is installed.
exit code: 0 success; 1 a finding at or above --fail-on, or no plan within --max-drop; 2 error;
  130 interrupted
"""
PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""{shell: the completion that shtab uses for paths}."""

VERBS: dict[str, type[Verb]] = {
    "audit": AuditTarget,
    "explain": Explain,
    "explain-layer": ExplainLayer,
    "rules": Rules,
    "apply": Apply,
    "snippet": Snippet,
    "ledger": Ledger,
    "diff": Diff,
    "fleet": Fleet,
    "rehearse": Rehearse,
}


class Parser(argparse.ArgumentParser):
    """A parser that raises an AuditorError with a one-line message for a usage error."""

    def error(self, message: str) -> NoReturn:
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        unknown = re.findall(r"(?<=\s)-[^\s=]+", message) if message.startswith("unrecognized arguments: ") else []
        close = dict.fromkeys(match for flag in unknown for match in difflib.get_close_matches(flag, known, n=1))
        raise bad(f"{message}: did you mean {' and '.join(close)}?" if close else message)


def parser() -> Parser:
    """The parser of the whole command line. `shtab --shell=bash --prog=auditor auditor.cli.parser` generates shell
    completion from it."""
    return parsers()[0]


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and one for each verb."""
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    whole = Parser(prog=PROGRAM, description=str(AuditTarget.__doc__).partition(". ")[0] + ".", epilog=EPILOG, **how)
    _add_options(whole, AuditTarget, AuditTarget.takes[1:])
    below = whole.add_subparsers(metavar="TARGET | VERB", required=True, parser_class=Parser)
    parts: dict[str, Parser] = {}
    for name, verb in VERBS.items():
        said = " ".join(str(verb.__doc__).split())
        parts[name] = below.add_parser(name, help=said, description=said, epilog=EPILOG * (name == "audit"), **how)
        _add_options(parts[name], verb, verb.takes)
    parts["audit"].prog = PROGRAM
    return whole, parts


def parse(words: Sequence[str]) -> Verb:
    """Parse the command line. The verb, `audit` by default, may follow flags. Raises: AuditorError."""
    whole, parts = parsers()
    actions = [action for part in parts.values() for action in part._actions if action.nargs is None]
    valued = {flag for action in actions for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in valued else 1
    if at >= len(words):
        whole.parse_args(words)
    word = words[at]
    if word in parts:
        return command_of(vars(parts[word].parse_args([*words[:at], *words[at + 1 :]])), VERBS[word])
    close = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.75) if re.fullmatch(r"[a-z-]+", word) else []
    there = close and (Path(word).exists() or Path(f"{word}.py").exists())
    if close and not there and not (word.isidentifier() and importlib.util.find_spec(word)):
        raise AuditorError(f"no verb, file or module is called {word!r}: did you mean {close[0]}?", "missing-target")
    return command_of(vars(parts["audit"].parse_args(words)), AuditTarget)


def _add_options(made: Parser, verb: type[Verb], names: Sequence[str]) -> None:
    """Add a verb's arguments to its parser. Options that the user omits are absent from the parsed result."""
    for name in dict.fromkeys((*names, "debug")):
        option, field = options_of(verb)[name], verb.model_fields[name]
        default = None if field.is_required() else field.default
        help = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", with_flags(option.help)).replace("`", "").replace("%", "%%")
        given = ",".join(default) if isinstance(default, tuple) else default
        if not isinstance(default, bool) and given not in (None, ""):
            help += f" (default: {given})"
        about: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help}
        if option.flag:
            about |= {"dest": name, "required": field.is_required()}
        if option.takes == "True or False":
            about["action"] = argparse.BooleanOptionalAction
        else:
            about |= {"metavar": option.shown or None, "action": "append" if name == "criteria" else "store"}
        if option.choices is not None and not isinstance(default, tuple):
            about["choices"] = [*option.choices()]
        if name == "onnx":
            about |= {"nargs": "?", "const": "fp32"}
        action = made.add_argument(*["-q"] * (name == "quiet"), option.flag or name, **about)
        if option.path:
            action.complete = PATHS  # type: ignore[attr-defined]
    made.add_argument("--version", action="version", version=f"auditor {__version__}", help="show the version and exit")
