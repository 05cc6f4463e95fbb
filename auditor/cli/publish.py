"""Puts an audit's files in place all at once: a run that stops half-way leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AuditorError

if TYPE_CHECKING:
    from ..records.audit import Audit

NOTHING: Mapping[str, str] = {}


def default_directory(name: str) -> Path:
    """Where the files about the model `name` go unless the user says otherwise."""
    folder = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
    return Path("audits") / (folder or "model")


def check_directory(directory: Path) -> None:
    """Raises before any work is done: AuditorError(slug="bad-output")."""
    try:
        nearest = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    except OSError as error:
        raise AuditorError(
            f"{str(directory)[:80]} is no path ({error.strerror}): name another with --out", "bad-output"
        ) from error
    if not nearest.is_dir():
        raise AuditorError(f"{nearest} is a file: name a directory with --out", slug="bad-output")
    if not os.access(nearest, os.W_OK):
        raise AuditorError(f"{nearest} cannot be written to: name another directory with --out", slug="bad-output")


def check_file(file: Path) -> None:
    """Raises before any work is done, where no file can be put there: AuditorError(slug="bad-output")."""
    if file.is_dir():
        raise AuditorError(f"{file} is a directory: name a file", slug="bad-output")
    check_directory(file.parent)


def write(audit: Audit, directory: Path, extra: Mapping[str, str] = NOTHING) -> tuple[Path, ...]:
    """Saves the audit into `directory`, replacing files of the same name and leaving all others alone.

    extra: texts of further files, by their path below the directory.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        audit.save(Path(scratch))
        for name, text in extra.items():
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            Path(scratch, name).write_text(text, encoding="utf-8")
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
