"""What TOML files say, and which findings are not wanted."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from .errors import AuditorError

CODE = r"^[A-Z]{3}\d{0,3}$"
"""A rule's code, or the letters of a family, with or without the beginning of a number."""


@dataclass(frozen=True)
class Ignore:
    """Findings not wanted: those whose code starts with `code`, in modules whose path the glob `module` matches.

    source: where that is said; reason: why, in the user's words ("" where none is asked for).
    """

    code: Annotated[str, Field(pattern=CODE)]
    module: str = "*"
    reason: str = ""
    source: str = "ignore"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def tables(file: Path, slug: str) -> dict[str, Any]:
    """What a TOML file holds. Raises: AuditorError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise AuditorError(f"{file}: it cannot be read ({error.strerror})", slug) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AuditorError(f"{file}: {error}", slug) from error
