"""Chooses an audit's directory; makes paths relative to their repository, so that they are the same everywhere."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..records import Subject
from ..records.folder import check_directory

_ABSOLUTE = re.compile(r"(?<![\w.~/-])/(?!/)[^\s:,;]+|(?<!\w)[A-Za-z]:\\\\[^\s:,;]+")

LIBRARIES = frozenset(("site-packages", "dist-packages"))


def from_repository(path: Path) -> str:
    """A path relative to its repository; outside one, to the working directory; outside both, the file's name."""
    root = _repository(path.parent)
    for base in (root, Path.cwd()):
        if base is not None and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return path.name if path.is_absolute() else path.as_posix()


def portable(text: str) -> str:
    """Replace the absolute paths in a text by relative ones."""
    return _ABSOLUTE.sub(lambda found: portable_path(found[0]), text)


def portable_path(path: str) -> str:
    """A path relative to its repository; for an installed package, relative to where packages are installed."""
    parts = Path(path).parts
    at = next((number for number, part in enumerate(parts) if part in LIBRARIES), None)
    return "/".join(parts[at:]) if at is not None else from_repository(Path(path))


@cache
def _repository(folder: Path) -> Path | None:
    """The nearest parent folder that contains `.git`; None if no parent does."""
    return next((f for f in (folder, *folder.parents) if (f / ".git").exists()), None)


def default_directory(subject: Subject) -> Path:
    """The output directory for a model if the user names none: `audits/NAME`.

    If that folder has the audit of another file's model, names of parent folders of the model's file precede NAME.
    Raises: AuditorError(slug="bad-output") if files cannot be written there.
    """
    name, file = subject.name, subject.origin.path if subject.origin else None
    folders = list(Path(file).parts[-2:0:-1]) if file else []
    while True:
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
        directory, audited = Path("audits") / (safe or "model"), None
        with suppress(OSError, ValueError, LookupError, TypeError):
            audited = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["subject"]["file"]
        if not file or not folders or not audited or str(audited) == portable_path(file):
            check_directory(directory)
            return directory
        name = f"{folders.pop(0)}-{name}"
