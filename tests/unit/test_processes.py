"""Processes that this one answers for: a body that SIGTERM unwinds, a group that ends with its leader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from auditor.processes import Process, unwound

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")

TERMINATED = """
import os, signal, sys
from auditor.processes import unwound
try:
    with unwound():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            print("went on")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one does not stop the cleaning up
            print("cleaned up", flush=True)
finally:
    print("not after the body", flush=True)
"""


def test_a_body_that_is_terminated_cleans_up_and_the_process_then_ends_of_it(root: Path) -> None:
    process = subprocess.run([sys.executable, "-c", TERMINATED], cwd=root, capture_output=True, timeout=60)
    assert process.stdout == b"cleaned up\n"
    assert process.returncode == -signal.SIGTERM


def test_afterwards_nobody_handles_the_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with unwound():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_of_the_users_own_is_left_in_place() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, own)
    try:
        with unwound():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_may_set_no_handler_and_do_not_try() -> None:
    handlers: list[object] = []

    def body() -> None:
        with unwound():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]


def test_a_group_is_killed_with_its_leader() -> None:
    code = "import subprocess, sys; sys.stderr.write('on'); subprocess.run(['sleep', '60'], close_fds=False)"
    read, write = os.pipe()
    os.set_inheritable(write, True)
    process = Process([sys.executable, "-c", code], close_fds=False)
    os.close(write)
    while process.last_words() != ["on"]:
        time.sleep(0.05)
    process.end()
    assert process.returncode == -signal.SIGKILL
    assert os.read(read, 1) == b""  # the child, which held the pipe open, is gone as well
    os.close(read)
    process.end()  # one that has ended is left in peace
