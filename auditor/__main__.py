"""`python -m auditor`."""

import os
import sys

try:
    from .cli.program import main

    code = main()
except KeyboardInterrupt:  # before there was a command to interrupt
    print("interrupted", file=sys.stderr)
    code = 130
if code == 130:  # Python would end itself by the signal, where one came while it ran a text
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
