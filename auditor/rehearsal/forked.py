"""Runs a function in a forked process, so that its changes need not be undone."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from typing import Any, TypeVar

import torch

from ..errors import LoadError
from ..loading.target import blame
from ..processes import how_ended

T = TypeVar("T")


def call_forked(
    work: Callable[[Callable[[int], None]], T], hear: Callable[[int], object] = int
) -> tuple[T | None, str]:
    """Call `work(send)` in a forked process without output: (its value, ""), or (None, reason of the failure). hear:
    called with every number that `work` sends."""

    def answer() -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):  # the user's step prints the same in every recipe
            os.dup2(null, stream)
        torch.set_num_threads(1)  # threads do not survive a fork
        try:
            there.send((work(there.send), ""))
        except (Exception, SystemExit) as error:
            there.send((None, str(error) if isinstance(error, LoadError) else blame(error)))

    here, there = Pipe(duplex=False)
    child = get_context("fork").Process(target=answer)
    child.start()
    there.close()
    message: Any = 0
    try:
        while isinstance(message, int):
            hear(message)
            message = here.recv()
        child.join()
    except EOFError:
        child.join()
        message = None, f"its process {how_ended(child.exitcode or 0)}"
    finally:
        child.kill()
        child.join()
        here.close()
    return message  # type: ignore[no-any-return]
