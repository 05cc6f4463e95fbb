"""Where the files of a command go, and what is asked before the work begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import folder
from ..document.places import shown
from ..document.read import programs_in
from ..records.audit import FILES

if TYPE_CHECKING:
    from ..records.audit import Audit

NOTHING: Mapping[str, str] = {}


def default_directory(name: str, file: str | None = None) -> Path:
    """Where the files about the model `name` go unless the user says otherwise.

    file: where it is from. If the audit of another file is there, the names of the folders above it are put in front.
    """
    folders = list(Path(file).parts[-2:0:-1]) if file else []
    while True:
        made = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
        directory = Path("audits") / (made or "model")
        if not folders or not _is_of_another(directory / "plan.json", file):
            return directory
        name = f"{folders.pop(0)}-{name}"


def _is_of_another(plan: Path, file: str | None) -> bool:
    """Whether a plan.json is of a model from another file."""
    try:
        known = json.loads(plan.read_text(encoding="utf-8"))["subject"]["file"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return known is not None and file is not None and known != shown(file)


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
