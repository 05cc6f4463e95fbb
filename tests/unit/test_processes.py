"""Processes that this one answers for: a group that ends with its leader."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from auditor.processes import Process

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


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
