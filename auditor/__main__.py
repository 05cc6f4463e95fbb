"""Entry point of `python -m auditor`: runs the command line."""

import sys

here = sys.path.pop(0)  # a file in the working directory may shadow a standard module
try:
    from .cli import main
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
sys.path.insert(0, here)
sys.exit(main())
