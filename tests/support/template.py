"""Verification processes of audits in the tests' own process: forked from one that has imported torch, which takes seconds.

Each is a process as fresh as the real one, which some tests of tests/unit/verify and all that run the command start, as users do;
but where an audit kills it in the middle of a job, it may still delete the audit's folder, as if the audit had ended.
"""

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from auditor.processes import Process
from auditor.verify import artefact

ROOT = Path(__file__).resolve().parents[2]

STANDS_IN = """
import array, json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
asked = json.dumps([os.getcwd(), dict(os.environ), sys.argv[2]]).encode()
given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 2]))]
line.sendmsg([len(asked).to_bytes(8, "big")], given)
line.sendall(asked)
code = int(line.makefile().read() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""The process that is started in the place of the real one: it hands on its files, waits, and ends as what was forked ends."""


@contextmanager
def forking() -> Iterator[None]:
    """In the body, verification processes are forked."""
    folder = tempfile.TemporaryDirectory()
    place = str(Path(folder.name) / "template")
    template: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **how: Any) -> Process:
        if not template:
            code = "import sys; from tests.support.template import serve; serve(sys.argv[1])"
            piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            template.append(subprocess.Popen([sys.executable, "-c", code, place], cwd=ROOT, **piped))
            assert template[0].stdout is not None
            template[0].stdout.readline()  # it listens
        return Process([sys.executable, "-I", "-S", "-c", STANDS_IN, place, command[-1]], **how)

    real, artefact.Process = artefact.Process, start  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        artefact.Process = real  # type: ignore[misc]
        for one in template:
            one.communicate()
        folder.cleanup()


def serve(place: str) -> None:
    """Fork a process for each that connects, until standard input ends."""
    from auditor.verify.worker import main

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("listens", flush=True)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        line, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (child := os.fork()) == 0:
                _take_over(line)
                main()
                break
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with suppress(OSError):  # nobody waits for a process that was given up
                line.sendall(str(code).encode())
            os._exit(0)
        line.close()


def _take_over(line: socket.socket) -> None:
    """Become the process that the other end of the line stands in for."""
    files = array.array("i")
    size, extra, *_ = line.recvmsg(8, socket.CMSG_SPACE(2 * files.itemsize))
    files.frombytes(extra[0][2])
    with line, line.makefile("rb") as asked:
        folder, environment, path = json.loads(asked.read(int.from_bytes(size, "big")))
    for number, file in zip((0, 1, 2), (files[0], os.open(os.devnull, os.O_WRONLY), files[1]), strict=True):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = json.loads(path)
    sys.argv = ["-c"]
