"""`python -m auditor`."""

import sys

if __name__ == "__main__":
    try:
        from .cli.program import main

        sys.exit(main())
    except KeyboardInterrupt:  # before there was a command to interrupt
        print("interrupted", file=sys.stderr)
        sys.exit(130)
