"""`python -m auditor`."""

import sys


def _exit_code() -> int:
    try:
        from .cli.program import main

        return main()
    except KeyboardInterrupt:  # before there was a command to interrupt
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        from .raised import hiding

        if (known := hiding(error)) is None:
            raise
        print(f"error: {known}\nhint: `python -m auditor explain {known.slug}` says more", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = _exit_code()
    if code == 130:  # where Ctrl-C came while Python ran a text, it would end itself by the signal, whoever caught it
        from .leaving import leave

        leave(code)
    sys.exit(code)
