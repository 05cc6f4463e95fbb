"""The command line: parses and runs a command; a failure becomes an exit code, one error line and a hint."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .. import __version__
from ..asked import command_of, validate
from ..command.output import set_aside
from ..command.verb import PROGRAM, Verb, WithTarget
from ..errors import AuditorError, caused_by, describe, first_line, out_of_memory, printable, suggest
from ..features import parts
from ..processes import (
    ignore_signals,
    is_interrupted,
    open_streams,
    supervise,
    unwind_on_signals,
)
from ..progress.shown import refresh_display, reporter
from ..records import folder
from ..settings import bad, either, options_of, with_flags
from .verbs import Apply, Audit, Diff, Explain, ExplainLayer, Fleet, Rules, Snippet

WIDTH = 80
"""Maximum number of columns of the help."""
CHOICES_SHOWN = 50
"""Maximum length in characters of the list of choices beside a flag; the description has a longer list."""
EPILOG = """\
TARGET:
  path/to/model.py[:symbol] or package.module[:symbol]
  a symbol may take arguments, also names of the file: model.py:Net(width=8),
  'model.py:GPT(GPTConfig(n_layer=2))'
  path/to/directory:entry of a hubconf.py, or path/to/program.pt2
  timm:NAME or hf:NAME_OR_PATH, if timm or transformers is installed

exit code:
  0 success; 1 a finding at or above --fail-on, or no plan within --max-drop;
  2 error; 130 interrupted
"""
GROUPS = {
    "model and inputs": ("inputs", "weights", "loss", "device", "memory", "seed"),
    "what to audit": ("formats", "strategies", "mode", "use", "gpu", "objective", "quick", "onnx"),
    "limits of the error": ("max_error", "criteria", "evaluate", "max_drop", "better"),
    "more measurements": ("generate", "temperature", "measure_time"),
    "rules": ("rules", "select", "ignore"),
    "results": ("out", "format", "fail_on", "baseline", "explain_layer", "model_explorer", "open"),
}
"""{title: options of an audit that its help shows under this title}; all others are general options."""
_OF_FEATURES: tuple[type[Verb], ...] = tuple(verb for _, command in parts("command") for verb in command.VERBS)
_VERBS: tuple[type[Verb], ...] = (Audit, Explain, ExplainLayer, Rules, Apply, Snippet, Diff, Fleet)
VERBS: dict[str, type[Verb]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "-", one.__name__).lower(): one for one in (*_VERBS, *_OF_FEATURES)
}
"""{name on the command line, such as `explain-layer`: its verb}, in the order of the help."""
PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""{shell: the completion that shtab uses for paths}."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 findings or a bad result, 2 error, 130 interrupted.

    argv: the command's words, if the calling process continues afterwards; by default the process's command line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        open_streams()
        unwind_on_signals()

    def command() -> int | None:
        verb = parse(words).model_copy(update={"command": f"{PROGRAM} {shlex.join(words)}"})
        with set_aside(alone=argv is None):
            return run(verb, alone=argv is None)

    try:
        code = exit_code_of(command, "--debug" in words)
        if argv is None:
            ignore_signals()
        return code
    except KeyboardInterrupt:
        if argv is None:
            ignore_signals()
        print("interrupted", file=sys.stderr)
        return 130


def run(verb: Verb, alone: bool) -> int | None:
    """Run a command and return its exit code; None: 0. Raises: AuditorError.

    alone: whether this process runs only the command. Then the user's code runs in a forked process, so that a crash
    of the code can be reported.
    """
    shown = reporter(verb.quiet or verb.dry_run or "quiet" not in verb.takes, verb)
    if not isinstance(verb, WithTarget):
        return verb.run(shown)

    def run_command(tell: Callable[[str], object]) -> int | None:
        shown.tell = tell
        with refresh_display(shown), warnings.catch_warnings(action=None if verb.debug else "ignore"):
            if verb.out and not verb.dry_run:
                folder.check_directory(verb.out)  # before anything slow
            shown(verb.stage, verb.target, 0, 0)
            return verb.run(shown)

    if not (alone and hasattr(os, "fork")):
        return run_command(shown.tell)
    try:
        return supervise(lambda tell: exit_code_of(lambda: run_command(tell), verb.debug), verb.timeout)
    finally:
        shown.close()  # erases the forked process's progress line


def exit_code_of(command: Callable[[], int | None], debug: bool) -> int:
    """Run a command and return its exit code; an exception becomes a message and a hint on stderr."""
    try:
        return command() or 0
    except BrokenPipeError:  # the reader of standard output has ended
        return 0
    except Exception as error:
        if is_interrupted():
            raise KeyboardInterrupt from error
        message, hint = _explain(error)
        if debug:
            traceback.print_exc()
        text = printable(" ".join(message.split()))
        print(f"error: {text}\nhint: {hint}\n", end="", file=sys.stderr)  # one write: other processes may write too
        return 2


def _explain(error: Exception) -> tuple[str, str]:
    """The message of an error, with a hint on what to do next."""
    explanation = describe(error, None)
    if out_of_memory(error):
        message = f"out of memory ({first_line(error)[:200]}): use a machine with more memory, or smaller inputs"
        error = AuditorError(message, slug="out-of-memory")
    if isinstance(error, SystemError):  # what Python raises where native code fails and does not say why
        message = (
            f"native code failed ({first_line(error)[:200]}), most often because the process was out of memory: "
            "use a machine with more memory, or smaller inputs"
        )
        error = AuditorError(message, slug="out-of-memory")
    if isinstance(error, AuditorError):
        if error.slug == "bad-option":
            return str(error), f"`{PROGRAM} --help` lists the options"
        return str(error), f"`{PROGRAM} explain {error.slug}` explains this error"
    if caused_by(error, TimeoutError):
        return f"stopped by a time limit, {explanation}", "raise the limit, or give smaller inputs"
    where = "".join(f" {note}" for note in getattr(error, "__notes__", ())[:1])
    return f"internal error{where}, {explanation}", "please report this error with the output of --debug"


class Parser(argparse.ArgumentParser):
    """A parser that raises an AuditorError with a one-line message for a usage error. parts: {verb: its parser}."""

    parts: Mapping[str, argparse.ArgumentParser]

    def error(self, message: str) -> NoReturn:
        known = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
        close = dict[str, None]()
        if message.startswith("unrecognized arguments: "):
            for flag in re.findall(r"(?<=\s)-[^\s=]+", message):
                close |= dict.fromkeys(difflib.get_close_matches(flag, known, 1, 0.7))
        if close:
            raise bad(f"{message}: did you mean {' and '.join(close)}?")
        raise bad(message)


def parser() -> Parser:
    """The parser of the whole command line. `shtab --shell=bash --prog=auditor auditor.cli.parser` generates shell
    completion from it."""
    how: dict[str, Any] = {"formatter_class": _help_formatter, "allow_abbrev": False, "add_help": False}
    about = textwrap.fill(str(Audit.__doc__).partition(". ")[0] + ".", WIDTH)
    usage = f"{PROGRAM} TARGET [options]\n       {PROGRAM} VERB ...\n       {PROGRAM} VERB --help"
    whole = Parser(prog=PROGRAM, usage=usage, description=about, epilog=_epilog(Audit), **how)
    below = whole.add_subparsers(title="target or verb", metavar="TARGET | VERB", required=True, parser_class=Parser)
    _add_options(whole, Audit, Audit.takes[1:])
    for name, verb in VERBS.items():
        description_text = " ".join(str(verb.__doc__).split())
        text = textwrap.fill(description_text, WIDTH)
        part = below.add_parser(
            name, help=description_text, usage=_usage(name, verb), description=text, epilog=_epilog(verb), **how
        )
        _add_options(part, verb, verb.takes)
    whole.parts = below.choices
    whole.parts["audit"].prog = PROGRAM
    return whole


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    columns = shutil.get_terminal_size().columns
    return argparse.RawDescriptionHelpFormatter(prog, width=min(columns, WIDTH))


def _usage(name: str, verb: type[Verb]) -> str:
    """The line of usage: the verb, its required arguments, and `[options]` for all others."""
    words = [PROGRAM] if verb is Audit else [PROGRAM, name]
    options = options_of(verb)
    for taken in verb.takes:
        if verb.model_fields[taken].is_required():
            option = options[taken]
            words.append(f"{option.flag} {option.shown}".strip())
    return " ".join((*words, "[options]"))


def _epilog(verb: type[Verb]) -> str:
    """What follows the options of a verb: for an audit what TARGET may be, and for all verbs examples."""
    lines = ["examples:"]
    for words, meaning in verb.examples:
        lines += [f"  # {meaning}", f"  {PROGRAM} {words}"]
    examples = "\n".join(lines)
    return f"{EPILOG}\n{examples}" if verb is Audit else examples


def parse(words: Sequence[str]) -> Verb:
    """Parse the command line. The verb, `audit` by default, may follow flags. Raises: AuditorError."""
    whole = parser()
    actions = [action for part in whole.parts.values() for action in part._actions if action.nargs is None]
    flags_with_value = {flag for action in actions for flag in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in flags_with_value else 1
    if at >= len(words):
        whole.parse_args(words)
    word = words[at]
    if word not in VERBS:
        _refuse_misspelt_verb(word)
        return command_of(vars(whole.parts["audit"].parse_args(words)), Audit)
    given = vars(whole.parts[word].parse_args([*words[:at], *words[at + 1 :]]))
    return command_of(given, Audit) if word == "audit" else validate(VERBS[word], given)


def _refuse_misspelt_verb(word: str) -> None:
    """Refuse a word that looks like a verb, unless it is a file or a module. Raises: AuditorError."""
    if not re.fullmatch(r"[a-z-]+", word):
        return
    close = suggest(word, VERBS, cutoff=0.75)
    if not close:
        return
    is_target = Path(word).exists() or Path(f"{word}.py").exists() or importlib.util.find_spec(word)
    if not is_target:
        raise AuditorError(f"no verb, file or module is called {word!r}: {close}", "missing-target")


def _add_options(made: Parser, verb: type[Verb], names: Sequence[str]) -> None:
    """Add a verb's arguments to its parser. Options that the user omits are absent from the parsed result."""
    options = options_of(verb)
    groups = dict[str, Any]()
    if verb is Audit:
        for title, members in GROUPS.items():
            groups |= dict.fromkeys(members, made.add_argument_group(title))
    general = made.add_argument_group("general" if groups else "options")
    in_groups = [name for name in groups if name in names]
    for name in dict.fromkeys((*in_groups, *names, "debug")):
        option, field = options[name], verb.model_fields[name]
        default = None if field.is_required() else field.default
        help = with_flags(option.plain_help).replace("`", "").replace("%", "%%")
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
            if len(",".join(about["choices"])) > CHOICES_SHOWN:
                about |= {"metavar": "NAME", "help": f"{either(about['choices'])}: {help}"}
        if name == "onnx":
            about |= {"nargs": "?", "const": "fp32"}
        if not option.flag and not field.is_required():
            about["nargs"] = "?"
        group = groups.get(name, general) if option.flag else made
        action: Any = group.add_argument(*["-q"] * (name == "quiet"), option.flag or name, **about)
        if option.path:
            action.complete = PATHS
    general.add_argument("-h", "--help", action="help", help="show this help and exit")
    general.add_argument(
        "--version", action="version", version=f"auditor {__version__}", help="show the version and exit"
    )
