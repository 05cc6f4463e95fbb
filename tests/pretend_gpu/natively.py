"""Tests that run in a process of their own, in which the pretend GPU has been started: torch cannot be rid of it again."""

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

SITE = Path(__file__).resolve().parent / "site"
"""On Python's path it starts the pretend GPU in the processes that verify plans as well."""

_inside = False


def natively(test: FunctionType) -> Callable[..., None]:
    """The test, run there; what it raises is raised here."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        if _inside:
            test(*args, **kwargs)
        else:
            file = Path(test.__code__.co_filename).relative_to(ROOT).with_suffix("")
            _process().submit(_call, ".".join(file.parts), test.__name__, args, kwargs).result(timeout=300)

    return run


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    global _inside
    from tests.pretend_gpu.start import start

    _inside = True
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")]))
    start()


def _call(module: str, name: str, args: Any, kwargs: Any) -> None:
    getattr(importlib.import_module(module), name)(*args, **kwargs)
