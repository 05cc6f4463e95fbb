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

from auditor.capture import source

ROOT = Path(__file__).resolve().parents[2]

SITE = Path(__file__).resolve().parent / "site"
"""On Python's path it starts the pretend GPU in the processes that verify plans as well."""

_inside = False
_kind_of = source.kind_of


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
    source.kind_of = kind_of
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH", "")]))
    start()


def kind_of(filename: str) -> str:
    """As the auditor's; a line of the pretended kernels is nobody's, like those of CUDA."""
    file = Path(filename)
    is_kernel = file.parent == Path(__file__).parent and not file.name.startswith("test_")
    return "" if is_kernel else _kind_of(filename)


def _call(module: str, name: str, args: Any, kwargs: Any) -> None:
    getattr(importlib.import_module(module), name)(*args, **kwargs)
