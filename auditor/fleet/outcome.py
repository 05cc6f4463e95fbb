"""How each audit of a fleet ended, kept beside the audits so that a fleet that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import __version__, folder
from .targets import Target

KEPT = "fleet.json"


class Outcome(BaseModel):
    """The end of one target's audits. said: the line that says why there is no audit. asked: digest of what was to be done."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked: str
    code: Annotated[int, Field(description="exit code of the last try; negative where a signal ended it")]
    said: str = ""
    seconds: float = 0.0
    tries: int = 1

    @property
    def audited(self) -> bool:
        """Whether there is an audit: with findings or without."""
        return self.code in (0, 1)


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format_version: int
    targets: dict[str, Outcome]


def asked_of(target: Target) -> str:
    """What tells whether a target was audited as it is asked for now: its options, and what lies in the files they name.

    Files that these import are not looked at.
    """
    told = json.dumps([__version__, list(target.words), str(target.folder)])
    digest = hashlib.sha256(told.encode("utf-8", "surrogateescape"))
    for word in target.words:
        named = word.partition("=")[2] if word.startswith("--") else word
        for path in sorted({named, named.partition(":")[0]}):
            with suppress(OSError, ValueError):
                digest.update(hashlib.sha256((target.folder / path).read_bytes()).digest())
    return digest.hexdigest()[:16]


def kept_in(directory: Path) -> dict[str, Outcome]:
    """How targets ended that were audited into a directory before; none where that cannot be read."""
    try:
        return _File.model_validate_json((directory / KEPT).read_text(encoding="utf-8")).targets
    except (OSError, ValueError, ValidationError):
        return {}


def keep(directory: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write how the targets ended. Raises: AuditorError(slug="bad-output")."""
    file = _File(format_version=1, targets=dict(outcomes))
    folder.write(directory, {KEPT: file.model_dump_json(indent=1) + "\n"})
