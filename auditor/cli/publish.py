"""Where the files of a command go, and what is asked before the work begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import folder
from ..document.replaced import programs_in
from ..records.audit import FILES

if TYPE_CHECKING:
    from ..records.audit import Audit

NOTHING: Mapping[str, str] = {}


def default_directory(name: str) -> Path:
    """Where the files about the model `name` go unless the user says otherwise."""
    made = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
    return Path("audits") / (made or "model")


def check(directory: Path, explorer: bool = False) -> None:
    """Raises before any work is done, where an audit cannot be written there: AuditorError(slug="bad-output").

    explorer: whether the files of `--model-explorer` go there too.
    """
    folder.check_directory(directory, (*FILES, *(["model_explorer/graph.json"] if explorer else [])))


def write(audit: Audit, directory: Path, extra: Mapping[str, str] = NOTHING) -> tuple[Path, ...]:
    """Saves the audit into `directory`, in place of one that is there, and leaves all other files alone.

    extra: texts of further files, by their path below the directory. Raises: AuditorError(slug="bad-output").
    """
    return folder.write(directory, {**audit.texts(directory), **extra}, programs_in(directory))
