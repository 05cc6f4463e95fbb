"""Where a finding's source line lies as seen from the repository it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..records import Finding, Node
from ..records.audit import Audit


@dataclass(frozen=True)
class Place:
    """A file relative to its repository, with forward slashes, and a line from 1."""

    file: str
    line: int


def places(audit: Audit) -> Mapping[str, Place]:
    """The place of every node that has findings; findings in installed packages point at the audited file instead."""
    nodes = {report.node.name: report.node for report in audit.nodes}
    return {finding.node: _place(audit, finding, nodes.get(finding.node)) for finding in audit.findings}


def _place(audit: Audit, finding: Finding, node: Node | None) -> Place:
    name, line = _split(finding.source or (node.source if node else None))
    path = node.source_path if node else None
    if line and path and "site-packages" not in Path(path).parts:
        return Place(_relative(Path(path)), line)
    if node is None and line:
        return Place(name, line)
    origin = audit.subject.origin
    if origin is not None and origin.path:
        return Place(_relative(Path(origin.path)), 1)
    return Place(name, line) if line else Place(re.sub(r":[A-Za-z_][^/\\]*$", "", audit.subject.target), 1)


def _split(source: str | None) -> tuple[str, int]:
    """`model.py:42` -> (`model.py`, 42); line 0 where there is none."""
    name, _, line = (source or "").rpartition(":")
    return (name, int(line)) if name and line.isdecimal() else (source or "", 0)


def _relative(path: Path) -> str:
    root = _repository(path.parent)
    for base in (root, Path.cwd()):
        if base is not None and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return path.name if path.is_absolute() else path.as_posix()


@cache
def _repository(folder: Path) -> Path | None:
    """The nearest folder upwards that holds `.git`."""
    return next((f for f in (folder, *folder.parents) if (f / ".git").exists()), None)
