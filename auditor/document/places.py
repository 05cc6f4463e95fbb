"""Files as seen from the repository they belong to: the same on every machine that has it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_ABSOLUTE = re.compile(r"(?<![\w.~/-])/(?!/)[^\s:,;]+|(?<!\w)[A-Za-z]:\\\\[^\s:,;]+")

LIBRARIES = frozenset(("site-packages", "dist-packages"))


def from_repository(path: Path) -> str:
    """A path from its repository, or else from the working directory; a file of neither is known by its name."""
    root = _repository(path.parent)
    for base in (root, Path.cwd()):
        if base is not None and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return path.name if path.is_absolute() else path.as_posix()


def portable(text: str) -> str:
    """A text with the absolute paths in it as `shown` has them."""
    return _ABSOLUTE.sub(lambda found: portable_path(found[0]), text)


def portable_path(path: str) -> str:
    """The same; a file of an installed package from where packages are installed."""
    parts = Path(path).parts
    at = next((number for number, part in enumerate(parts) if part in LIBRARIES), None)
    return "/".join(parts[at:]) if at is not None else from_repository(Path(path))


def is_installed(path: str | None) -> bool:
    """Whether a file belongs to an installed package, and so to no repository of the user's."""
    return path is not None and not LIBRARIES.isdisjoint(Path(path).parts)


@cache
def _repository(folder: Path) -> Path | None:
    """The nearest folder upwards that holds `.git`."""
    return next((f for f in (folder, *folder.parents) if (f / ".git").exists()), None)
