"""`python -m auditor`."""

import sys

from .cli.program import main

if __name__ == "__main__":
    sys.exit(main())
