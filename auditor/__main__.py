"""Entry point of `python -m auditor`: runs the command line."""

import sys

here = sys.path.pop(0)  # a file of the working directory may have the name of a module of Python
try:
    from .cli.program import main
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
sys.path.insert(0, here)
sys.exit(main())
