"""Serves edited texts for files of the user, to this process alone: no file changes, and no project is copied."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ...isolation.process import swap_attribute

_FileLoader: Any = SourceFileLoader.__bases__[0]
"""The class that reads the files of modules; `importlib` has no public name for it."""


@contextmanager
def serve(texts: Mapping[str, str]) -> Iterator[None]:
    """In the `with` block, an import of a file reads its text here; tracebacks and `inspect` do, too.

    texts: {absolute path of a file: its edited text}. Files that were imported before are not imported again.
    """
    by_path = {str(Path(file).resolve()): text for file, text in texts.items()}
    read_data, read_stats = _FileLoader.get_data, SourceFileLoader.path_stats

    def edited(path: Any) -> str | None:
        return by_path.get(str(Path(path).resolve()))

    def get_data(loader: Any, path: str) -> bytes:
        text = edited(path)
        return read_data(loader, path) if text is None else text.encode()

    def path_stats(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if edited(path) is not None:
            raise OSError(f"{path} is edited in memory")  # so that no cached bytecode is read, and none is written
        return read_stats(loader, path)

    for path, text in by_path.items():
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    try:
        with (
            swap_attribute(_FileLoader, "get_data", get_data),
            swap_attribute(SourceFileLoader, "path_stats", path_stats),
        ):
            yield
    finally:
        for path in by_path:
            linecache.cache.pop(path, None)
