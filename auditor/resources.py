"""Where the data that ships with the package lies: inside the wheel, or beside the package in a checkout."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from .errors import AuditorError

_PACKAGE = Path(__file__).resolve().parent


def resource_dir(name: str) -> Path:
    """The directory `name` ("rules" or "reports").

    An installed wheel holds it as package data, a checkout (plain or editable) beside the package.
    Raises: AuditorError(slug="resource-missing").
    """
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name).is_dir():
            return parent / name
    raise AuditorError(
        f"the directory {name!r} is neither in {_PACKAGE} nor beside it: reinstall the package, or run from a complete "
        "checkout",
        slug="resource-missing",
    )


@cache
def table(name: str) -> dict[str, Any]:
    """Facts about torch and devices, each file with its source: the contents of `auditor/<name>.toml`."""
    return tomllib.loads((_PACKAGE / f"{name}.toml").read_text(encoding="utf-8"))
