"""Entry point of `python -m auditor` and of the command `auditor`: runs the command line."""

import os
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    _prepare_process()
    from .cli import main as run

    return run()


def _prepare_process() -> None:
    """Make this process end when it has to, before the imports of the command line, which may take seconds."""
    _stop_on_signals()
    from .processes import end_with_caller

    end_with_caller()


def _stop_on_signals() -> None:
    """Let a signal end this process at once while modules are imported: an exception there could be caught by the
    importing code, or end in its traceback."""
    import _signal  # built in: `signal` takes a while to import, and a file in the working directory may shadow it

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(_signal, name, None)
        if number is not None and _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _stop)


def _stop(number: int, frame: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    here = sys.path.pop(0)  # a file in the working directory may shadow a standard module
    _prepare_process()
    from . import cli  # noqa: F401

    sys.path.insert(0, here)
    sys.exit(main())
