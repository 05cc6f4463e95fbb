"""One small model of every family that libraries ship: is it captured, measured, and handed verified plans?

A library is a module of this package, named in `LIBRARIES`, with two functions: `names()`, all its models, and
`build(name)`, the model in eval mode with the positional and the keyword arguments of one call.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

# Lets libraries import a torchvision without compiled operators.
runpy.run_path(str(Path(__file__).resolve().parents[2] / "tests" / "stubs" / "sitecustomize.py"))

LIBRARIES = ("timm", "transformers", "torchvision", "diffusers", "packages")
"""`packages` is many: its models are called `PACKAGE/MODEL`."""

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Unbuilt(Exception):
    """The model cannot be made or run here in FP32; nothing was audited."""


class Library(Protocol):
    """What a module of this package offers."""

    names: Callable[[], list[str]]
    build: Callable[[str], Built]


def library(name: str) -> Library:
    """The module of that name. Raises: ImportError where the library is not installed."""
    return cast(Library, importlib.import_module(f"{__name__}.{name}"))
