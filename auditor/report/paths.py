"""Where a finding's source line lies as seen from the repository it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..document.places import from_repository, is_installed
from ..records import Finding, Node
from ..records.audit import Audit


@dataclass(frozen=True)
class Place:
    """A file relative to its repository, with forward slashes, and a line from 1."""

    file: str
    line: int


def places(audit: Audit) -> Mapping[str, Place]:
    """The place of every node that has findings.

    Findings in installed packages point at the line that called the package instead, or at the audited file.
    """
    nodes = {report.node.name: report.node for report in audit.nodes}
    return {finding.node: _place(audit, finding, nodes.get(finding.node)) for finding in audit.findings}


def callers(audit: Audit) -> Mapping[str, Place]:
    """The place of the call that led to a node, where that is in the user's code and not its place already."""
    own = {r.node.name: r.node for r in audit.nodes if r.node.caller_path and not is_installed(r.node.source_path)}
    found = {name: _caller(node) for name, node in own.items()}
    return {name: place for name, place in found.items() if place is not None}


def _place(audit: Audit, finding: Finding, node: Node | None) -> Place:
    name, line = written_at(finding.source or (node.source if node else None))
    path = node.source_path if node else None
    if line and path and not is_installed(path):
        return Place(from_repository(Path(path)), line)
    caller = _caller(node) if node else None
    if caller is not None:
        return caller
    if node is None and line:
        return Place(name, line)
    if audit.subject.file:
        return Place(from_repository(Path(audit.subject.file)), 1)
    return Place(name, line) if line else Place(re.sub(r":[A-Za-z_][^/\\]*$", "", audit.subject.target), 1)


def _caller(node: Node) -> Place | None:
    _, line = written_at((node.called_from or "").partition(" in ")[0])
    if not line or node.caller_path is None or is_installed(node.caller_path):
        return None
    return Place(from_repository(Path(node.caller_path)), line)


def written_at(source: str | None) -> tuple[str, int]:
    """`model.py:42` -> (`model.py`, 42); line 0 where there is none."""
    name, _, line = (source or "").rpartition(":")
    return (name, int(line)) if name and line.isdecimal() else (source or "", 0)
