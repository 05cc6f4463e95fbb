"""Calls a function in a forked process, in which patches of torch and of the model need not be undone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...errors import LoadError
from ...loading.target import call
from ...processes import supervise

bad_step = partial(LoadError, slug="bad-step")
"""The error for a step that cannot be rehearsed, from its message."""


def call_forked(work: Callable[[Callable[[str], None]], Any], hear: Callable[[str], object] = str) -> Any:
    """Call `work(tell)` in a forked process without output; return its value. hear: called with each message that `work`
    passes to `tell`. Raises: AuditorError if `work` raises, or its process is killed; CallbackError if `hear` raises."""

    def answer(tell: Callable[[Any], None]) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # the user's step prints the same in every recipe
            os.dup2(null, stream)
        torch.set_num_threads(1)  # threads do not survive a fork
        try:
            tell(call(work, "the recipe", "bad-step", tell))
        except LoadError as error:
            tell(error)
        finally:
            os._exit(0)

    done = supervise(answer, hear=hear, cleans_up=False)
    if isinstance(done, LoadError):
        raise done
    return done
