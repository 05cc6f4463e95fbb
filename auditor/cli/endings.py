"""Whatever ends a command: an exit code, and one line on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from ..errors import AuditorError, first_line
from ..processes import Listener, supervised
from ..progress.shown import Shown, ticking
from ..raised import out_of_memory, time_is_up
from ..report.words import printable
from . import streams

PROGRAM = "python -m auditor"

LONGEST = 1_600
"""Characters of an error, at most: several hundred say what went wrong, and more push it out of the terminal."""


def watched(run: Callable[[Listener], int], shown: Shown, timeout: float | None, debug: bool, alone: bool) -> int:
    """`run(progress)`, which runs the user's code; its exit code.

    alone: whether this process is there for nothing else: however the code ends its own process, this one then says so.
    """

    def own(progress: Listener) -> int:
        try:
            return run(progress)
        except SystemExit as left:
            raise AuditorError(
                f"the model's own code called sys.exit({'' if left.code is None else left.code}): nothing was written; have "
                "it raise instead",
                slug="process-ended",
            ) from left

    if alone and hasattr(os, "fork"):
        return supervised(lambda told: answered(lambda: own(told), debug), shown, timeout)
    with ticking(shown):
        return own(shown)


def answered(command: Callable[[], int], debug: bool) -> int:
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
        known = error if isinstance(error, AuditorError) else _explained(error)
        if known is not None:
            options = known.slug == "bad-option"
            hint = f"`{PROGRAM} --help` lists the options" if options else f"`{PROGRAM} explain {known.slug}` says more"
            return _failed(str(known), hint, debug)
        said = f"{type(error).__name__}: {first_line(error)}"
        if time_is_up(error):
            return _failed(f"a time limit ended it, {said}", "give it more time, or smaller inputs", debug)
        where = "".join(
            f" {note}" for note in getattr(error, "__notes__", ())[:1]
        )  # whatever else breaks is ours to fix
        return _failed(f"internal error{where}, {said}", "please report it with --debug", debug)


def _explained(error: Exception) -> AuditorError | None:
    """What to say where the machine is why; None where it is not."""
    if out_of_memory(error):
        return AuditorError(
            f"memory ran out ({first_line(error)[:200]}): give more, or smaller inputs", slug="out-of-memory"
        )
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return AuditorError("no temporary directory can be written to: name one with TMPDIR", slug="bad-output")
    return None


def _failed(message: str, hint: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    text = printable(" ".join(message.split()))  # it may quote names out of a file or a model, however long
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
    print(f"error: {text}\nhint: {hint}\n", end="", file=sys.stderr)  # in one piece: others may write there too
    return 2
