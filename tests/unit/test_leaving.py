"""A process that leaves does what it would do at its end: it waits for threads, calls exit functions, flushes."""

from __future__ import annotations

import subprocess
import sys

import pytest

DOES = """
import atexit, sys, threading, time, weakref
from auditor.leaving import leave
class Kept:
    def __del__(self): print("taken apart")
kept = Kept()
atexit.register(lambda: print("exit function"))
weakref.finalize(kept, print, "finalizer")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sys.stdout.write("unflushed\\n")
leave(3)
"""


def test_all_is_done_but_taking_apart() -> None:
    done = subprocess.run([sys.executable, "-c", DOES], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines() == ["unflushed", "thread", "finalizer", "exit function"]


@pytest.mark.parametrize(
    "before", ["import sys; sys.stdout.close()", "import sys; sys.stderr = None", "import os; os.close(1)"]
)
def test_streams_that_are_gone_are_no_matter(before: str) -> None:
    code = f"{before}\nfrom auditor.leaving import leave\nleave(2)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 2


CYCLES = """
import gc
from auditor.leaving import leave
class Kept:
    def __init__(self, name):
        self.name, self.itself = name, self
    def __del__(self): print(self.name)
gc.disable()
library = Kept("a library's")
gc.freeze()
Kept("the model's")
held = Kept("still held")
del library
leave(0)
"""


def test_cycles_that_nobody_holds_are_taken_apart_but_for_what_was_set_aside() -> None:
    done = subprocess.run([sys.executable, "-c", CYCLES], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == ["the model's"]
