"""Where the data that ships with the package lies: inside the wheel, or beside the package in a checkout."""

from __future__ import annotations

import re
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
    raise _missing(name)


def _missing(name: str) -> AuditorError:
    return AuditorError(
        f"{name!r} is neither in {_PACKAGE} nor beside it: reinstall the package, or run from a complete checkout",
        slug="resource-missing",
    )


@cache
def errors() -> dict[str, str]:
    """What is to be said of every error, by its slug: the sections of errors.md, as Markdown.

    Raises: AuditorError(slug="resource-missing").
    """
    places = (_PACKAGE / "errors.md", _PACKAGE.parent / "docs" / "errors.md")
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise _missing("errors.md")
    _, *sections = re.split(r"(?m)^#{2,3} ", file.read_text(encoding="utf-8"))
    named = (section.partition("\n")[::2] for section in sections)
    return {
        name.strip(): text.strip() for name, text in named if re.fullmatch(r"[a-z0-9-]+", name.strip()) and text.strip()
    }


@cache
def table(name: str) -> dict[str, Any]:
    """Facts about torch and devices, each file with its source: the contents of `auditor/<name>.toml`."""
    return tomllib.loads((_PACKAGE / f"{name}.toml").read_text(encoding="utf-8"))
