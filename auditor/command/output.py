"""Standard output, to which only a command's result goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from ..errors import AuditorError

_answer: TextIO = sys.stdout
"""The real standard output, after `set_aside` has redirected `sys.stdout`."""


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), _answer.fileno())
        raise
    except OSError as error:
        message = f"standard output cannot be written to ({error.strerror}): send it elsewhere"
        raise AuditorError(message, slug="bad-output") from error
