"""Hints at files that an import does not find, although they lie near the target: in a folder above it, or in `src`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LEVELS = 4
"""Number of folders above the target's file that are searched."""


def find_near(name: str, path: Path | None) -> Path | None:
    """The folder from which `import name` works, among the folders above a file and their `src`; None without one.

    name: of a module, with or without its packages. path: of the target's file; None for the working directory.
    """
    first = Path(*name.split("."))
    start = Path.cwd() / "model.py" if path is None else path
    for folder in _folders(start):
        if (folder / first).with_suffix(".py").is_file() or (folder / first / "__init__.py").is_file():
            return folder
    return None


def _folders(path: Path) -> Iterator[Path]:
    for folder in path.parents[:LEVELS]:
        yield folder
        yield folder / "src"
