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
    return cast("Reporter", importlib.import_module(f"{__name__}.{name}"))


def rendered(name: str, audit: Audit) -> str:
    """The audit as the reporter of that name writes it; what that raises is noted to come from it."""
    try:
        return reporter(name).render(audit)
    except Exception as error:
        error.add_note(f"in the reporter {name!r}")
        raise


def files(audit: Audit) -> Mapping[str, str]:
    """{file name: text} of the reporters that are written to a file."""
    return {file: rendered(name, audit) for name in names() if (file := getattr(reporter(name), "FILE", None))}
