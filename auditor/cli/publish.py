"""Where the files of a command go, and what is asked before the work begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import folder
from ..document.places import shown
from ..document.read import programs_in
from ..records.audit import FILES

if TYPE_CHECKING:
    from ..records.audit import Audit

NOTHING: Mapping[str, str] = {}

LABELS = {
    "report.html": "Report",
    "plan.json": "Plan",
    "measurements.json": "Measured",
    "patched_model.py": "Patched",
    "findings.sarif": "SARIF",
    ".pt2": "Program",
    ".onnx": "ONNX",
}
"""What files of an audit are called, by their names or how these end; all others are for Google's Model Explorer."""


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


def extra(audit: Audit, wanted: bool) -> dict[str, str]:
    """Further files beside those of every audit, by their path: what `--model-explorer` asks for."""
    if not wanted:
        return {}
    from ..report import model_explorer

    return {f"model_explorer/{name}": text for name, text in model_explorer.files(audit).items()}


def listing(files: Sequence[Path]) -> str:
    """One line per file that was written."""
    labels = (LABELS.get(file.name) or LABELS.get(file.suffix, "Explorer") for file in files)
    return "\n".join(f"{label:<8} {file}" for label, file in zip(labels, files, strict=True))
