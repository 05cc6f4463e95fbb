"""A process for each model, forked from one that has the libraries imported: a crash, a hang, a lack of memory is a row."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import auditor

from .one import Row, row_of

PR_SET_PDEATHSIG = 1
"""Linux's name for: this process does not outlive the one that started it."""
CPU_SECONDS = 240
WALL_SECONDS = 3600
"""Long, since other work may share the machine: it ends what waits for ever."""
MEMORY = 8 << 30
"""Bytes of address space above what the libraries take."""


def warm() -> None:
    """Import here what an audit imports, so that no child has to."""
    auditor.audit(nn.Linear(4, 4), (torch.randn(2, 4),), device="cpu")


def run_alone(library: str, name: str) -> Row:
    """The row of a model, whatever becomes of its process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _answer(library, name, writer)
    os.close(writer)
    text, in_time = _read(reader, child)
    _, status = os.waitpid(child, 0)
    *stages, last = text.split("\n")
    if last:
        row: Row = json.loads(last)
        return row
    outcome, reason = _death(status) if in_time else ("late", f"more than {WALL_SECONDS} seconds")
    where = f" in the stage '{stages[-1]}'" if stages else ""
    return {"library": library, "model": name, "outcome": outcome, "reason": reason + where}


def _death(status: int) -> tuple[str, str]:
    """What became of a process that gave no row, and why."""
    if not os.WIFSIGNALED(status):
        return "killed", f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return "late", f"more than {CPU_SECONDS} seconds of processor time"
    return "killed", signal.Signals(number).name


def _answer(library: str, name: str, writer: int) -> None:
    """Runs in the child, and does not return."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgrp()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    warnings.simplefilter("ignore")
    code = 1
    try:
        os.write(writer, json.dumps(row_of(library, name, _teller(writer))).encode())
        code = 0
    finally:
        os._exit(code)


def _teller(writer: int) -> Callable[[str], None]:
    """What writes a line for every stage that begins: what the row is to say where there is none in the end."""
    told = list[str]()

    def tell(stage: str) -> None:
        if told[-1:] != [stage]:
            told.append(stage)
            os.write(writer, f"{stage}\n".encode())

    return tell


def _read(reader: int, child: int) -> tuple[str, bool]:
    """What the child wrote by its end, and whether that came in time; else its end is brought about."""
    deadline, parts, in_time = time.monotonic() + WALL_SECONDS, list[bytes](), True
    with os.fdopen(reader, "rb", buffering=0) as stream:
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.killpg(child, signal.SIGKILL)
                in_time = False
                break
            if not (part := stream.read(1 << 16)):
                break
            parts.append(part)
    return b"".join(parts).decode(), in_time
