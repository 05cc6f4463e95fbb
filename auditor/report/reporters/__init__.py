"""Reporters: a module each, found by lying in this folder; each takes an Audit alone and returns text."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from ...records.audit import Audit


class Reporter(Protocol):
    """What a module here offers. A module that names a FILE is also written beside plan.json under that name."""

    def render(self, audit: Audit) -> str:
        """The audit as text; ends with a newline."""


def names() -> tuple[str, ...]:
    """What `--format` may ask for; none of them is imported for it."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def reporter(name: str) -> Reporter:
    """The reporter of that name."""
    return cast(Reporter, importlib.import_module(f"{__name__}.{name}"))


def files(audit: Audit) -> Mapping[str, str]:
    """{file name: text} of the reporters that are written to a file."""
    found = {name: reporter(name) for name in names()}
    return {file: one.render(audit) for one in found.values() if (file := getattr(one, "FILE", None))}
