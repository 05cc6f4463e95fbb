"""The command line: finds the verb, and turns whatever ends it into an exit code and one line."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import AuditorError, first_line
from ..raised import out_of_memory, time_is_up
from ..report.words import printable
from . import audit, completion, diff, explain_layer, fleet, guard, options, snippet, streams, verbs
from .verbs import PROGRAM

LONGEST = 1_600
"""Characters of an error, at most: several hundred say what went wrong, and more push it out of the terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 clean, 1 findings, 2 error, 130 interrupted.

    argv: the command's words where this process has other things to do; else it is this command's alone.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (words[0], words[1:]) if words and words[0] in VERBS else ("audit", words)
    debug = "--debug" in words
    if argv is None:
        streams.set_aside()

    def command() -> int:
        make_parser, run = VERBS[verb]
        parser = make_parser()
        _check_where()
        if verb == "audit" and rest:
            _refuse_misspelt(rest[0])
        args = parser.parse_args((options.configured(parser) if verb == "audit" else []) + rest)
        args.command = f"{PROGRAM} {shlex.join(words)}"
        if argv is None and verb in RUN_CODE:
            return guard.watched(lambda: _answered(lambda: _own(run, args), debug), args.timeout)
        return _own(run, args)

    return _answered(command, debug)


def _own(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """What the verb returns. Raises: AuditorError where the user's code would end the process instead."""
    try:
        return int(run(args))
    except SystemExit as left:
        raise AuditorError(
            f"the model's own code called sys.exit({'' if left.code is None else left.code}): nothing was written; have it raise "
            "instead",
            slug="process-ended",
        ) from left


def _refuse_misspelt(word: str) -> None:
    """Raises: AuditorError(slug="missing-target") where the first word is nearly a verb, and no file or module has that name."""
    close = difflib.get_close_matches(word, VERBS, n=1, cutoff=0.75) if re.fullmatch(r"[a-z-]+", word) else []
    if close and not Path(word).exists() and not Path(f"{word}.py").exists() and not _is_module(word):
        raise AuditorError(f"no verb, file or module is called {word!r}: did you mean {close[0]}?", "missing-target")


def _is_module(name: str) -> bool:
    """Whether Python finds a module of that name; nothing is imported."""
    return name.isidentifier() and importlib.util.find_spec(name) is not None


def _check_where() -> None:
    """Raises: AuditorError(slug="no-directory")."""
    try:
        Path.cwd()
    except OSError as error:
        raise AuditorError(
            f"the working directory is not there any more ({error.strerror}): change to one that is", "no-directory"
        ) from error


def _answered(command: Callable[[], int], debug: bool) -> int:
    """The exit code of a command; what it raises is put in one line on stderr."""
    try:
        return command()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        streams.abandon()
        return 0
    except Exception as error:
        known = error if isinstance(error, AuditorError) else _short_of_memory(error) or _nowhere(error)
        if known is not None:
            return _failed(str(known), f"`{PROGRAM} explain {known.slug}` says more", debug)
        said = f"{type(error).__name__}: {first_line(error)}"
        if time_is_up(error):
            return _failed(f"a time limit ended it, {said}", "give it more time, or smaller inputs", debug)
        where = "".join(
            f" {note}" for note in getattr(error, "__notes__", ())[:1]
        )  # whatever else breaks is ours to fix
        return _failed(f"internal error{where}, {said}", "please report it with --debug", debug)


def _short_of_memory(error: Exception) -> AuditorError | None:
    """What to say where memory ran out; None where it did not."""
    if not out_of_memory(error):
        return None
    return AuditorError(
        f"memory ran out ({first_line(error)[:200]}): give more, or smaller inputs", slug="out-of-memory"
    )


def _nowhere(error: Exception) -> AuditorError | None:
    """What to say where no folder takes files that vanish again; None where that is not why."""
    if not isinstance(error, FileNotFoundError) or "No usable temporary directory" not in str(error):
        return None
    return AuditorError("no temporary directory can be written to: name one with TMPDIR", slug="bad-output")


def _failed(message: str, hint: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    # In one piece: others may write to the same stream
    print(f"error: {_in_a_line(message)}\nhint: {hint}\n", end="", file=sys.stderr)
    return 2


def _in_a_line(message: str) -> str:
    """A message that may quote names out of a file or a model, however long: both ends of it."""
    text = printable(" ".join(message.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _complete(args: argparse.Namespace) -> int:
    streams.say(completion.script(args.shell, {name: make for name, (make, _) in VERBS.items()}))
    return 0


VERBS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "audit": (options.audit_parser, audit.audit),
    "explain": (verbs.explain_parser, verbs.explain),
    "explain-layer": (explain_layer.explain_layer_parser, explain_layer.explain_layer),
    "rules": (verbs.rules_parser, verbs.rules),
    "apply": (verbs.apply_parser, verbs.apply),
    "snippet": (snippet.snippet_parser, snippet.snippet),
    "diff": (diff.diff_parser, diff.diff),
    "fleet": (fleet.fleet_parser, fleet.fleet),
    "completion": (completion.completion_parser, _complete),
}

RUN_CODE = ("audit", "apply")
"""Verbs that run code of the user's."""
