"""`python -m auditor`."""

import sys

if __name__ == "__main__":
    try:
        from .cli.program import main

        sys.exit(main())
    except KeyboardInterrupt:  # before there was a command to interrupt
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        from .raised import hiding

        if (known := hiding(error)) is None:
            raise
        print(f"error: {known}\nhint: `python -m auditor explain {known.slug}` says more", file=sys.stderr)
        sys.exit(2)
