"""Makes paths of files relative to their repository, so that they are the same everywhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

LIBRARIES = frozenset(("site-packages", "dist-packages"))
_ABSOLUTE = re.compile(r"(?<![\w.~/-])/(?!/)[^\s:,;]+|(?<!\w)[A-Za-z]:\\\\[^\s:,;]+")


def from_repository(path: Path) -> str:
    """A path relative to its repository; outside one, to the working directory; outside both, the file's name."""
    root = repository_of(path.parent)
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
def repository_of(folder: Path) -> Path | None:
    """The nearest parent folder that contains `.git`; None if no parent does."""
    return next((f for f in (folder, *folder.parents) if (f / ".git").exists()), None)
