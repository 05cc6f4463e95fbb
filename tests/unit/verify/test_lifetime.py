"""Processes that end each other: a body that SIGTERM unwinds, a child that is killed, one that follows its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from auditor.processes import unwound
from auditor.verify.lifetime import end, ended, hand

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

FOLLOWING = """
import sys, time
from auditor.verify.lifetime import jobs
handed = jobs()
next(handed)
print(repr(sys.stdin.read()), flush=True)
print(list(handed), flush=True)
time.sleep(60)
"""


def started(root: Path, code: str, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_a_body_that_is_terminated_cleans_up_and_the_process_then_ends_of_it(root: Path) -> None:
    process = started(root, TERMINATED)
    output, _ = process.communicate(timeout=60)
    assert output == b"cleaned up\n"
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


def test_a_group_is_killed_with_its_leader(tmp_path: Path, root: Path) -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    process = started(root, code)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    end(process)
    assert process.returncode == -signal.SIGKILL
    assert process.stdin is not None
    assert process.stdin.closed
    assert process.stdout.read() == b""  # the child, which held the pipe open, is gone as well
    assert child > 0
    end(process)  # one that has ended is left in peace


def test_a_child_ends_with_whoever_holds_its_standard_input(tmp_path: Path, root: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = started(root, FOLLOWING)
    hand(process, {"scratch": str(scratch)})
    assert process.stdout is not None
    assert process.stdout.readline() == b"''\n"  # its own standard input is empty
    assert scratch.exists()
    assert process.stdin is not None
    hand(process, "one")
    hand(process, "tw\no")
    assert not ended(process, 0.1)  # it sleeps
    assert process.stdout.readline() == b"['one', 'tw\\no']\n"
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert not scratch.exists()
