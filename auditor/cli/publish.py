"""Where the files of a command go, and what is asked before the work begins."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .. import folder
from ..document.places import shown
from ..document.read import programs_in
from ..records.audit import FILES

if TYPE_CHECKING:
    from ..records import Subject
    from ..records.audit import Audit


def default_directory(subject: Subject) -> Path:
    """Where the files about a model go unless the user says otherwise.

    If the audit of a model from another file is there, the names of the folders above its file are put in front.
    """
    name, file = subject.name, subject.origin.path if subject.origin else None
    folders = list(Path(file).parts[-2:0:-1]) if file else []
    while True:
        made = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
        directory = Path("audits") / (made or "model")
        if not file or not folders or _file_of(directory / "plan.json") in (None, shown(file)):
            return directory
        name = f"{folders.pop(0)}-{name}"


def _file_of(plan: Path) -> str | None:
    """The file of the model that a plan.json is about, if that can be known."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads(plan.read_text(encoding="utf-8"))["subject"]["file"] or "") or None
    return None


def check(directory: Path, explorer: bool) -> None:
    """Raises before any work is done, where an audit cannot be written there: AuditorError(slug="bad-output").

    explorer: whether the files of `--model-explorer` go there too.
    """
    folder.check_directory(directory, (*FILES, *(["model_explorer/graph.json"] if explorer else [])))


def write(audit: Audit, directory: Path, explorer: bool) -> tuple[Path, ...]:
    """Saves the audit into `directory`, in place of one that is there, and leaves all other files alone.

    Raises: AuditorError(slug="bad-output").
    """
    from ..report import model_explorer

    extra = {f"model_explorer/{name}": text for name, text in model_explorer.files(audit).items()} if explorer else {}
    return folder.write(directory, {**audit.texts(directory), **extra}, programs_in(directory))
