"""Entry point of `python -m auditor` and of the command `auditor`: runs the command line."""

import os
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    stop_on_signals()
    from .cli import main as run

    return run()


def stop_on_signals() -> None:
    """Let a signal end this process at once while modules are imported: an exception there could be caught by the
    importing code, or end in its traceback."""
    import signal  # here, since a file in the working directory may shadow it before `sys.path` is changed

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    here = sys.path.pop(0)  # a file in the working directory may shadow a standard module
    stop_on_signals()
    from . import cli  # noqa: F401

    sys.path.insert(0, here)
    sys.exit(main())
