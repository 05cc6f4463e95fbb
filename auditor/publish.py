"""Puts an audit's files in place all at once: a run that stops half-way leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import AuditorError

if TYPE_CHECKING:
    from .result import Audit


def default_directory(name: str) -> Path:
    """Where the files about the model `name` go unless the user says otherwise."""
    folder = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
    return Path("audits") / (folder or "model")


def check_directory(directory: Path) -> None:
    """Raises before any work is done: AuditorError(slug="bad-output")."""
    nearest = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise AuditorError(f"{nearest} is a file: name a directory with --out", slug="bad-output")
    if not os.access(nearest, os.W_OK):
        raise AuditorError(f"{nearest} cannot be written to: name another directory with --out", slug="bad-output")


def write(audit: Audit, directory: Path) -> tuple[Path, ...]:
    """Saves the audit into `directory`, replacing files of the same name and leaving all others alone."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        audit.save(Path(scratch))
        directory.mkdir(exist_ok=True)
        return tuple(_move(entry, directory / entry.name) for entry in sorted(Path(scratch).iterdir()))


def write_text(text: str, file: Path) -> Path:
    """Puts one file in place, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as scratch:
        draft = Path(scratch, file.name)
        draft.write_text(text, encoding="utf-8")
        return _move(draft, file)


def _move(source: Path, target: Path) -> Path:
    if target.is_dir():
        shutil.rmtree(target)
    return source.replace(target)
