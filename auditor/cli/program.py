"""Runs one command: only its result goes to stdout; an error becomes an exit code, a message and a hint on stderr."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Annotated, Any, ClassVar, TextIO

from ..asked import Command
from ..errors import AuditorError, caused_by, describe, first_line, out_of_memory, printable
from ..processes import supervise
from ..progress.shown import refresh_display, reporter
from ..records import folder
from ..settings import Option

PROGRAM = "python -m auditor"

_answer: TextIO = sys.stdout
"""The real standard output, after `set_aside` has redirected `sys.stdout`."""


class Verb(Command):
    """A command and its arguments. takes: names of its arguments, in the order of the help; some are options of
    `audit`. alone: whether this process runs only the command.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    alone: bool = False

    @classmethod
    def called(cls) -> str:
        """The verb on the command line: `explain-layer` for ExplainLayer."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    def run(self) -> int | None:
        """Run the command and return its exit code; None: 0. Raises: AuditorError."""
        raise NotImplementedError


class Loading(Verb):
    """A command that loads the user's code. The function of that name in `commands` runs the command; its first stage
    is `stage`. A lone command runs in a forked process, so that a crash of the user's code can be reported."""

    stage: ClassVar[str] = "load"
    target: Annotated[str, Option(shown="TARGET")]
    """the model's file or module, such as model.py:Net"""

    def run(self) -> int | None:
        shown = reporter(self.quiet or self.dry_run, self)

        def run_command(tell: Callable[[str], object]) -> int | None:
            shown.tell = tell
            with refresh_display(shown), warnings.catch_warnings(action=None if self.debug else "ignore"):
                if self.out:
                    folder.check_directory(self.out)  # before anything slow
                shown(self.stage, self.target, 0, 0)
                command: Any = getattr(import_module(".commands", __package__), self.called())  # imports torch
                return command(self, shown)

        if not (self.alone and hasattr(os, "fork")):
            return run_command(shown.tell)
        try:
            return supervise(lambda tell: exit_code_of(lambda: run_command(tell), self.debug), self.timeout)
        finally:
            shown.close()  # erases the forked process's progress line


def exit_code_of(command: Callable[[], int | None], debug: bool) -> int:
    """Run a command and return its exit code; an exception becomes a message and a hint on stderr."""
    try:
        return command() or 0
    except BrokenPipeError:  # the reader of standard output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), _answer.fileno())
        return 0
    except Exception as error:
        message, hint = _explain(error)
        if debug:
            traceback.print_exc()
        text = printable(" ".join(message.split()))
        print(f"error: {text}\nhint: {hint}\n", end="", file=sys.stderr)  # one write: other processes may write too
        return 2


def _explain(error: Exception) -> tuple[str, str]:
    """The message of an error, with a hint on what to do next."""
    said = describe(error, None)
    if out_of_memory(error):
        message = f"out of memory ({first_line(error)[:200]}): use a machine with more memory, or smaller inputs"
        error = AuditorError(message, slug="out-of-memory")
    if isinstance(error, AuditorError):
        if error.slug == "bad-option":
            return str(error), f"`{PROGRAM} --help` lists the options"
        return str(error), f"`{PROGRAM} explain {error.slug}` explains this error"
    if caused_by(error, TimeoutError):
        return f"stopped by a time limit, {said}", "raise the limit, or give smaller inputs"
    where = "".join(f" {note}" for note in getattr(error, "__notes__", ())[:1])
    return f"internal error{where}, {said}", "please report this error with the output of --debug"


class _Diversion:
    """Replaces `sys.stdout` for all code except `say`: writes go to stderr; `isatty` describes standard output."""

    def __init__(self, answer: TextIO) -> None:
        self.isatty = answer.isatty

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@contextmanager
def set_aside(alone: bool) -> Iterator[None]:
    """In the body, only `say` reaches standard output; output of all other code goes to stderr.

    alone: also redirect file descriptor 1, until this process ends. Output of C code, child processes and exit handlers
    then stays visible, but never mixes with the result.
    """
    global _answer
    _answer = sys.stdout
    if alone:
        sys.stdout.flush()
        _answer = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
        os.dup2(2, 1)
    with redirect_stdout(_Diversion(_answer)):  # type: ignore[type-var]
        yield


def say(text: str) -> None:
    """Print text to standard output and flush it.

    Raises: BrokenPipeError if the reader has ended; AuditorError(slug="bad-output") if writing fails.
    """
    try:
        print(text, end="", file=_answer, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"standard output cannot be written to ({error.strerror}): send it elsewhere"
        raise AuditorError(message, slug="bad-output") from error
