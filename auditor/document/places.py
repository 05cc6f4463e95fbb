"""Chooses an audit's directory; makes the paths in a text relative, so that they are the same everywhere."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from ..capture.source import portable_path
from ..records import Subject
from ..records.folder import check_directory

_ABSOLUTE = re.compile(r"(?<![\w.~/-])/(?!/)[^\s:,;]+|(?<!\w)[A-Za-z]:\\\\[^\s:,;]+")


def portable(text: str) -> str:
    """Replace the absolute paths in a text by relative ones."""
    return _ABSOLUTE.sub(lambda found: portable_path(found[0]), text)


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
