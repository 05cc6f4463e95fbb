"""`python -m auditor`."""

import os
import sys

try:
    here = sys.path.pop(0)  # a file of the working directory may have the name of one of Python's
    from .cli.program import main

    sys.path.insert(0, here)
    code = main()
except KeyboardInterrupt:  # before there was a command to interrupt
    print("interrupted", file=sys.stderr)
    code = 130
if code == 130:  # Python would end itself by the signal, where one came while it ran a text
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
