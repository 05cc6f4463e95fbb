"""Writes several files into a folder, all or none; a failure becomes a one-line error."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import AuditorError

ROOM = 1 << 20
"""Free bytes required before an audit begins, roughly the size of its files."""

OWN = ".auditor-"
"""Prefix of temporary files and folders, which are deleted after writing."""


def path_of(given: object, what: str) -> Path:
    """The caller's argument as a path. Raises: AuditorError(slug="bad-option") for a value of another type."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise AuditorError(f"{what} must be a path, not a value of type {type(given).__name__}", slug="bad-option")


def check_directory(directory: Path) -> None:
    """Check early that files can be written. Raises: AuditorError(slug="bad-output")."""
    with _refuse_errors(directory), tempfile.TemporaryFile(prefix=OWN, dir=_nearest(directory)) as probe:
        probe.write(bytes(ROOM))
        probe.flush()


def write(directory: Path, texts: Mapping[str, str | bytes], gone: Iterable[str] = ()) -> tuple[Path, ...]:
    """Write texts or bytes to files by their path below `directory`; other files are unchanged.

    gone: obsolete files to delete. All texts are written before a file is replaced. Raises:
    AuditorError(slug="bad-output").
    """
    with _refuse_errors(directory), tempfile.TemporaryDirectory(prefix=OWN, dir=_nearest(directory)) as scratch:
        for name, text in texts.items():
            draft = Path(scratch, name)
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(text if isinstance(text, bytes) else text.encode(errors="backslashreplace"))
        for name in texts:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            if (directory / name).is_dir():
                raise OSError(f"{name} is a directory")
        for name in set(gone) - texts.keys():
            (directory / name).unlink(missing_ok=True)
        return tuple(Path(scratch, name).replace(directory / name) for name in texts)


def _nearest(directory: Path) -> Path:
    """The folder itself or its nearest existing parent."""
    return next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())


@contextmanager
def _refuse_errors(path: Path) -> Iterator[None]:
    """Convert file system errors in the body to AuditorError(slug="bad-output")."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot write to {str(path)[:200]!a} ({reason}): choose another directory with --out"
        raise AuditorError(message, slug="bad-output") from error
