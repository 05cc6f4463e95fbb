"""A command, from its words to its exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import AuditorError
from . import streams
from .endings import PROGRAM, answered


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 clean, 1 findings, 2 error, 130 interrupted.

    argv: the command's words where this process has other things to do; else it is this command's alone.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        streams.set_aside()

    def command() -> int:
        from .parsers import parsed

        try:
            Path.cwd()
        except OSError as error:
            raise AuditorError(
                f"the working directory is not there any more ({error.strerror}): change to one that is", "no-directory"
            ) from error
        args = parsed(words)
        args.command, args.alone = f"{PROGRAM} {shlex.join(words)}", argv is None
        return int(args.run(args))

    return answered(command, "--debug" in words)
