"""Standard output holds the answer of a command and nothing else, whatever the user's code writes there."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from ..errors import AuditorError

_answer: TextIO | None = None
"""Standard output, once it was set aside for `say`."""


class _Diverted:
    """What `sys.stdout` is to everybody but `say`: its words go to stderr, its looks are those of standard output."""

    def __init__(self, answer: TextIO) -> None:
        self._looks = answer

    def isatty(self) -> bool:
        return self._looks.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def set_aside() -> None:
    """From now on, to the end of this process, file descriptor 1 is stderr; `say` alone reaches standard output.

    So what C code, child processes and exit handlers write is seen, and in no answer. Streams that were closed when the
    process began lead nowhere.
    """
    global _answer
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is not None:
        sys.stdout.flush()
    encoding = getattr(sys.stdout, "encoding", "utf-8")
    _answer = os.fdopen(os.dup(1), "w", encoding=encoding, errors="backslashreplace")
    os.dup2(2, 1)
    sys.stdout = _Diverted(_answer)


def say(text: str) -> None:
    """Put text on standard output, at once.

    Raises: BrokenPipeError where nobody reads it; AuditorError(slug="bad-output") where it cannot be written.
    """
    try:
        print(text, end="", file=_answer or sys.stdout, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AuditorError(
            f"standard output cannot be written to ({error.strerror}): send it elsewhere", "bad-output"
        ) from error


def abandon() -> None:
    """Let what nobody reads any more lead nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (_answer or sys.stdout).fileno())
