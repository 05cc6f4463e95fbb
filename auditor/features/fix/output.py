"""Writes fixes: as a patch, as JSON, and into the user's files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import AuditorError
from ...records import Fixes
from ...records.folder import write

PATCH, DATA = "fixes.patch", "fixes.json"
"""Names of the files that a search for fixes writes beside the report."""


def texts_of(fixes: Fixes) -> dict[str, str]:
    """{name of a file beside the report: its text}."""
    return {PATCH: fixes.patch, DATA: json.dumps(to_dict(fixes), indent=1) + "\n"}


def to_dict(fixes: Fixes) -> dict[str, Any]:
    """The fixes as plain data, without the texts of whole files; Inf and NaN as text, since JSON has neither."""
    data = asdict(fixes)
    del data["texts"]
    return _plain(data)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value


def apply_fixes(fixes: Fixes) -> tuple[Path, ...]:
    """Write the fixed text of every file; returns the files.

    Raises: AuditorError(slug="changed-source"), before anything is written, if a file has changed since the audit;
    "bad-output" if writing fails.
    """
    for one in fixes.texts:
        with Path(one.file).open(encoding="utf-8", newline="") as opened:
            if opened.read() != one.before:
                raise AuditorError(f"{one.file} has changed since the audit: run `fix` again", "changed-source")
    for one in fixes.texts:
        path = Path(one.file).resolve()  # a link stays a link
        mode = path.stat().st_mode
        write(path.parent, {path.name: one.after})
        path.chmod(mode)
    return tuple(Path(one.file) for one in fixes.texts)
