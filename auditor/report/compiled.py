"""Compiled templates, kept where Python keeps compiled modules: to compile them takes longer than the page takes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
from jinja2.bccache import Bucket, BytecodeCache


class Compiled(BytecodeCache):
    """A file for each template, in the `__pycache__` that a module in its place would have; where Python writes none, neither does this.

    options: of the environment; code that was compiled under others, of another text or by another Jinja is passed over.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder = folder
        self._compiler = f"{jinja2.__version__} {sorted(options.items())}\n"

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """The template's own name: each has a file."""
        return name

    def get_source_checksum(self, source: str) -> str:
        """Of all that the code is made of."""
        return hashlib.sha256((self._compiler + source).encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        """What lies there, as far as it is whole."""
        with suppress(Exception), self._file(bucket).open("rb") as file:
            bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep it, as a whole or not at all."""
        if sys.dont_write_bytecode:
            return
        file = self._file(bucket)
        draft = file.with_name(f"{file.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                draft.write_bytes(bucket.bytecode_to_string())
                draft.replace(file)
            finally:
                draft.unlink(missing_ok=True)

    def _file(self, bucket: Bucket) -> Path:
        return Path(importlib.util.cache_from_source(str(self._folder / bucket.key)))
