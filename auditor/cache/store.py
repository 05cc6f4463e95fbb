"""The folder: a JSON file an entry, of numbers and names alone, written whole or not at all, and believed only where it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import AuditorError
from ..folder import own

VERSION = 1
"""Of the entries; those of another are not read."""

LARGEST = 1 << 28
"""Bytes of an entry that is read."""

_KEY = re.compile(r"[a-z]+-[0-9a-f]{64}")


class Store:
    """Entries by key. failed: why one could not be written; nothing is written after that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = ""

    def get(self, key: str) -> Any | None:
        """What an entry holds; None where there is none, or what lies there is not what was written."""
        try:
            text = self._text(self._file(key))
            entry = json.loads(text) if text else None
        except (OSError, ValueError, RecursionError, MemoryError):
            return None
        if not isinstance(entry, dict) or (entry.get("auditor_cache"), entry.get("key")) != (VERSION, key):
            return None
        held = entry.get("holds")
        return held if entry.get("sha256") == _sum(held) else None

    def put(self, key: str, holds: Mapping[str, Any]) -> None:
        """Write an entry in the place of an older one. Where that fails the audit goes on without."""
        if self.failed:
            return
        entry = {"auditor_cache": VERSION, "key": key, "sha256": _sum(holds), "holds": holds}
        draft = self.folder / f"{own()}{secrets.token_hex(8)}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with draft.open("x", encoding="utf-8") as file:
                json.dump(entry, file)
            draft.replace(self._file(key))
        except (OSError, ValueError) as error:
            self.failed = getattr(error, "strerror", None) or str(error)
        finally:
            with suppress(OSError, ValueError):
                draft.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        assert _KEY.fullmatch(key), key
        return self.folder / f"{key}.json"

    @staticmethod
    def _text(file: Path) -> str:
        """Of a regular file: opening anything else may wait for ever."""
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, encoding="utf-8") as opened:
            found = os.fstat(handle)
            return opened.read() if stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST else ""


def check(folder: Path) -> None:
    """Raises, before any work is done, AuditorError(slug="bad-cache") where nothing can be kept there."""
    if (reason := _refusal(folder)) is not None:
        shown = str(folder) if len(str(folder)) <= 200 else f"{str(folder)[:80]}..."
        raise AuditorError(
            f"{shown!a} cannot keep measurements ({reason}): name another directory with --cache, or leave it out",
            slug="bad-cache",
        )


def _refusal(folder: Path) -> str | None:
    """Why nothing can be kept there; what is tried is a file without a name in the nearest folder that there is."""
    try:
        with suppress(FileNotFoundError):
            folder.stat()  # refuses names that no file can have
        above = (folder, *folder.absolute().parents)
        there = next((path for path in above if path.exists() or path.is_symlink()), folder)
        if not there.is_dir():
            return f"{there} is no directory" if there != folder else "it is no directory"
        with tempfile.TemporaryFile(prefix=own(), dir=there):
            return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _sum(holds: Any) -> str:
    text = json.dumps(holds, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
