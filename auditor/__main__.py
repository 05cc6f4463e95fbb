"""`python -m auditor`."""

import os
import sys


def _exit_code() -> int:
    try:
        from .cli.program import main

        return main()
    except KeyboardInterrupt:  # before there was a command to interrupt
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        _uncover()
        from .raised import hiding

        if (known := hiding(error)) is None:
            raise
        print(f"error: {known}\nhint: `python -m auditor explain {known.slug}` says more", file=sys.stderr)
        return 2


def _uncover() -> None:
    """Have Python's own modules found again, where files in the working directory were imported in their place."""
    here = os.getcwd()  # noqa: PTH109 - pathlib may be what a file here stands in place of
    sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
    for name in sys.stdlib_module_names & sys.modules.keys():
        if str(getattr(sys.modules[name], "__file__", "")).startswith(here + os.sep):
            del sys.modules[name]


if __name__ == "__main__":
    code = _exit_code()
    if (
        code == 130
    ):  # Python ends itself by the signal, whatever exit code it is asked for, where one came while it ran a text
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
