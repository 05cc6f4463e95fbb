"""The end of a process that is done: Python would take every module of every library apart first, for a second or more."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End as Python does: threads awaited, exit functions called, what nobody holds deleted, streams flushed; all other memory is
    left to the system."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    gc.collect()  # not through what was frozen: libraries, half a million objects that no model made
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
