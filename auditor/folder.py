"""Files put into a folder together: each whole, all of one audit, and refused in one line where they cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import AuditorError

DRAFT = ".auditor-{pid}-"
"""What names of unfinished files begin with, and those of anything else that this process takes away again."""

PROBE = 1 << 20
"""Bytes that must find room before an audit begins: what its files take, roughly."""


def own(pid: int | None = None) -> str:
    """The beginning of names that a process takes away again; this one's unless another is named."""
    return DRAFT.format(pid=os.getpid() if pid is None else pid)


def path_of(given: object, what: str) -> Path:
    """What a caller gave as a path. Raises: AuditorError(slug="bad-option") where it is none."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise AuditorError(f"{what} is a path, not a value of type {type(given).__name__}", slug="bad-option")


def check_directory(directory: Path, files: Iterable[str] = ()) -> None:
    """Raises before any work is done, where `files` cannot be put there: AuditorError(slug="bad-output").

    Nothing is left behind: what is tried is a file without a name in the nearest folder that there is.
    """
    with refused(directory):
        nearest = _nearest(directory)
        for name in files:
            _refuse_in_the_way(directory, name)
        with tempfile.TemporaryFile(prefix=own(), dir=nearest) as probe:
            probe.write(bytes(PROBE))
            probe.flush()


def check_file(file: Path) -> None:
    """Raises before any work is done, where no file can be put there: AuditorError(slug="bad-output")."""
    with refused(file):
        if file.is_dir():
            raise _bad(f"{file} is a directory: name a file")
    check_directory(file.parent)


def write(directory: Path, texts: Mapping[str, str | bytes], gone: Iterable[str] = ()) -> tuple[Path, ...]:
    """Puts texts, or bytes, into files by their path below `directory`, replacing those and leaving all others alone.

    gone: files of what is replaced that it has no successors of: these are taken away.
    They appear together: of two processes that write there at once, the files of one are there in the end. Until the
    last is written, none is in place. Raises: AuditorError(slug="bad-output").
    """
    with refused(directory):
        made = _made(directory)
        try:
            with tempfile.TemporaryDirectory(prefix=own(), dir=directory, ignore_cleanup_errors=True) as scratch:
                for name, text in texts.items():
                    draft = Path(scratch, name)
                    draft.parent.mkdir(parents=True, exist_ok=True)
                    if isinstance(text, bytes):
                        draft.write_bytes(text)
                    else:
                        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
                with _alone(directory):
                    for name in set(gone) - texts.keys():
                        (directory / name).unlink(missing_ok=True)
                    return tuple(_moved(Path(scratch, name), directory / name) for name in texts)
        except BaseException:
            _unmade(made)
            raise


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """What the file system says to the body becomes AuditorError(slug="bad-output")."""
    try:
        yield
    except (OSError, ValueError) as error:
        named = str(getattr(error, "filename", None) or path)
        where = str(path) if own() in named else named
        reason = getattr(error, "strerror", None) or str(error)
        shown = where if len(where) <= 200 else where[:80] + "..."
        raise _bad(f"{shown!a} cannot be written to ({reason}): name another place with --out") from error


def _bad(message: str) -> AuditorError:
    return AuditorError(message, slug="bad-output")


def _refuse_in_the_way(directory: Path, name: str) -> None:
    """What is not a file where one is to be, or not a folder where one is to be."""
    file = directory / name
    if file.is_dir() and not file.is_symlink():
        raise _bad(f"{file} is a directory, and a file of that name is to be written: move it away")
    if file.parent != directory and file.parent.exists() and not file.parent.is_dir():
        raise _bad(f"{file.parent} is a file, and a directory of that name is to be written: move it away")


def _nearest(directory: Path) -> Path:
    """The folder itself or the nearest above it that exists."""
    for folder in (directory, *directory.absolute().parents):
        if folder.is_dir():
            return folder
        if folder.is_symlink() and not folder.exists():
            raise _bad(f"{str(folder)!a} is a link that leads nowhere: name another directory with --out")
        if folder.exists():
            raise _bad(f"{folder} is a file: name a directory with --out")
    raise _bad(f"{directory} is below no folder: name another directory with --out")


def _made(directory: Path) -> list[Path]:
    """Make the folder and those above it that are missing; those that were, innermost first."""
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing


def _unmade(made: list[Path]) -> None:
    """Folders that were made and hold nothing."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The body runs in one process at a time, and no signal that is to end it stops it half-way."""
    lock = _locked(directory)
    signals = {signal.SIGINT, signal.SIGTERM}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
        if held is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _locked(directory: Path) -> int | None:
    """A lock on the folder, until it is closed; None where the system or the file system has none."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(directory, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def _moved(draft: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return draft.replace(target)


def swept(folder: Path, pid: int) -> None:
    """Take away what a process that has ended could not take away itself; what still writes there ends by itself."""
    for _ in range(40):
        left = list(folder.glob(f"{own(pid)}*"))
        for entry in left:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        if not left:
            return
        time.sleep(0.05)
