"""The user's function in the process that runs emitted files."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from ..errors import AuditorError
from ..imitation import as_on
from ..isolation import isolated
from ..recursion import deep
from ..score import Given, Unscored, given_by, named
from .running import failure_of
from .scores import COUNTED, FP32, counted

QUIET = 0.5
"""Seconds between two of these."""


def score_plan(
    patched: ModuleType, model: nn.Module, plan: str, asked: Mapping[str, Any], settings: Mapping[str, Any]
) -> Given | str:
    """What the function gives of the model under one plan, or why it gives nothing; the model is then as it was.

    FP32 stands for the model itself, run as it is; where it is a plan all the same, that raises what is stored low.
    """

    def applied() -> nn.Module:
        if plan in patched.PLANS:
            patched.apply(model, plan)
        return model

    with isolated(model):
        return score_model(applied, plan, asked, settings)


def score_model(
    made: Callable[[], nn.Module], plan: str, asked: Mapping[str, Any], settings: Mapping[str, Any]
) -> Given | str:
    """What the function gives of the model that `made()` gives, or why it gives nothing."""
    seed = settings["seed"]
    around = nullcontext if plan == FP32 else partial(as_on, settings["device"])
    with deep():
        try:
            model = made()
            scoring = named(asked["function"], seed=seed)
            with _ended_after(asked["limit"]):
                told = _teller(plan, Path(settings["scratch"]))
                return given_by(scoring, model, seed=seed, around=around, most=asked["most"], told=told)
        except (Unscored, AuditorError) as error:
            return str(error)
        except Exception as error:
            return failure_of(error)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Whatever the body is at, it ends with Unscored; where the system has no timers, whoever waits ends the process."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Unscored(f"the function gave no score within {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _teller(plan: str, scratch: Path) -> Callable[[int], None]:
    """Writes down how far the function is, for whoever shows it."""
    last = 0.0

    def tell(count: int) -> None:
        nonlocal last
        if time.monotonic() - last > QUIET:
            last = time.monotonic()
            (scratch / COUNTED).write_text(counted(plan, count), encoding="utf-8")

    return tell
