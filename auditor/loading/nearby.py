"""Hints at files that the user's code does not find, although they lie near the target: in its folder or one above it, or in
`src`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LEVELS = 4
"""Number of folders above the target's file that are searched."""

PROJECT_FILES = ("pyproject.toml", "setup.py")
"""Files that make a folder a project which pip installs."""


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


def find_project(path: Path) -> Path | None:
    """The folder that pip installs, the nearest one around the file with a pyproject.toml or a setup.py; None without one."""
    folders = path.parents[:LEVELS]
    return next((one for one in folders if any((one / name).is_file() for name in PROJECT_FILES)), None)


def hint_at_file(error: BaseException, path: Path | None) -> str:
    """Where to run the command, to add to a message; "" unless the error is of a relative path that exists from the
    target's folder or one above it. path: of the target's file."""
    if not isinstance(error, FileNotFoundError) or path is None or not isinstance(error.filename, str):
        return ""
    name, here = Path(error.filename), Path.cwd()
    if name.is_absolute() and name.is_relative_to(here):  # of a library that resolved it
        name = name.relative_to(here)
    folder = next((one for one in path.parents[:LEVELS] if (one / name).exists()), None)
    if name.is_absolute() or folder is None:
        return ""
    return f": run in {folder}, where {name} exists"


def _folders(path: Path) -> Iterator[Path]:
    for folder in path.parents[:LEVELS]:
        yield folder
        yield folder / "src"
