"""Reports findings at source lines of the user's repository, as GitHub workflow commands or SARIF 2.1.0."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..capture.places import from_repository
from ..capture.source import Place, is_installed
from ..records import Finding, Node
from ..records.audit import Audit
from ..records.paths import pattern
from .findings import Cause, causes_by_place
from .fixes import sarif_fixes
from .view import ReportView
from .words import count, label, line, op, printable, scope, sentence, summary


def place_of(audit: Audit, cause: Cause) -> Place:
    """The source line to report for a cause (a group of findings). If this line is in an installed package: the user's
    line that called the package or, if unknown, line 1 of the audited file."""
    name, line = written_at(cause.worst.source)
    written = Place(name, line, 1) if line else None
    node = cause.report.node if cause.report else None
    own = (_own(cause.worst.source, node.source_path, node.column) or _caller(node)) if node is not None else written
    if own is None and audit.subject.file:
        return Place(from_repository(Path(audit.subject.file)), 1, 1)
    return own or written or Place(re.sub(r":[A-Za-z_][^/\\]*$", "", audit.subject.target), 1, 1)


def _caller(node: Node) -> Place | None:
    """The Place of the user's call that reached a node's source line; None if unknown."""
    return _own((node.called_from or "").partition(" in ")[0], node.caller_path, node.caller_column)


def _own(source: str | None, path: str | None, column: int | None) -> Place | None:
    """The Place of a line such as `model.py:42` of the file `path`; None if unknown or in an installed package."""
    _, line = written_at(source)
    return Place(from_repository(Path(path)), line, column or 1) if line and path and not is_installed(path) else None


def written_at(source: str | None) -> tuple[str, int]:
    """Parse a source location: `model.py:42` -> (`model.py`, 42); the line is 0 if missing."""
    name, _, line = (source or "").rpartition(":")
    return (name, int(line)) if name and line.isdecimal() else (source or "", 0)


LEVELS = {
    "error": ("error", "error", "error"),
    "warning": ("warning", "warning", "warning"),
    "info": ("notice", "note", "recommendation"),
}
"""{severity: (GitHub workflow command, SARIF level, `problem.severity` of GitHub's code scanning)}."""
MOST_PER_LEVEL = 10
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_RESULTS = 5000
MOST_LOCATIONS = 100
LONGEST_TEXT = 1000


def github(audit: Audit) -> str:
    """Text for the log of GitHub Actions: the verdict, and an annotation for each cause at the user's line, at most ten
    for each severity. If causes are omitted, the last line counts them."""
    seen, result = ReportView(audit), causes_by_place(audit)
    shown: list[str] = []
    for severity, (command, *_) in LEVELS.items():
        for cause in [cause for cause in result if cause.severity == severity][:MOST_PER_LEVEL]:
            worst, place = cause.worst, place_of(audit, cause)
            at = f"file={_property(place.file)},line={place.line},col={place.column}"
            title, words = _property(f"{worst.rule} {worst.name}"), f"{_message(cause)} {summary(worst.advice)}".strip()
            shown.append(f"::{command} {at},title={title}::{_data(words)}")
    left = [f"{count(len(result) - len(shown), 'more problem')} in the report."] if len(result) > len(shown) else []
    # The runner must not execute a line of the verdict as a command.
    said = (printable(said).replace("::", ": :") for said in (seen.headline, *seen.broken))
    return "\n".join([*said, *shown, *left]) + "\n"


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(audit: Audit) -> str:
    """A SARIF file with one run: the causes, at most 5,000, and their rules. Equal audits give equal bytes."""
    result = causes_by_place(audit)[:MOST_RESULTS]
    rules = {cause.worst.rule: cause.worst for cause in reversed(result)}
    results = [
        {
            "ruleId": cause.worst.rule,
            "ruleIndex": list(rules).index(cause.worst.rule),
            "level": LEVELS[cause.severity][1],
            "message": {"text": _message(cause)},
            "occurrenceCount": len(cause.members),
            "locations": [_location(cause, place_of(audit, cause))],
            **_related_call(cause),
            **sarif_fixes(audit, cause.members),
            "partialFingerprints": {"primaryLocationLineHash": identity, "auditor/v1": identity},
        }
        for cause, identity in _fingerprints(result).items()
    ]
    driver = {
        "name": "Model precision auditor",
        "semanticVersion": audit.environment.auditor,
        "rules": [_rule(finding) for finding in rules.values()],
    }
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"precision-auditor/{quote(audit.subject.name, safe='')}/"},
        "columnKind": "utf16CodeUnits",
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(finding: Finding) -> dict[str, Any]:
    words = finding.name.replace("-", " ").replace("_", " ").strip() or finding.rule
    help_text = "\n\n".join(part.strip() for part in (finding.why, finding.advice) if part.strip()) or words
    sources = "".join(f"\n- {item}" for item in finding.references)
    help_markdown = f"**Why.** {finding.why.strip()}\n\n**What to do.** {finding.advice.strip()}"
    _, level, problem = LEVELS[finding.declared or finding.severity]
    address = re.search(r"https://\S+", " ".join(finding.references))
    return {
        "id": finding.rule,
        "name": "".join(word.capitalize() for word in words.split()),
        "shortDescription": {"text": f"{words[0].upper()}{words[1:]}."},
        "fullDescription": {"text": (summary(finding.why) or words)[:LONGEST_TEXT]},
        "help": {"text": help_text, "markdown": help_markdown + (f"\n\n**References.**\n{sources}" if sources else "")},
        **({"helpUri": address[0]} if address else {}),
        "defaultConfiguration": {"level": level},
        "properties": {
            "precision": finding.confidence,
            "problem.severity": problem,
            "tags": ["precision", *finding.formats],
        },
    }


def _message(cause: Cause) -> str:
    worst = cause.worst
    place = f"In {cause.where} ({op(worst.op)}), {', '.join(map(label, cause.formats))}."
    at = f"Written at {line(worst.source, worst.called_from)}." if worst.called_from else ""
    return " ".join(filter(None, (sentence(worst.message), place, at, sentence(cause.size), cause.plan_effect)))


def _related_call(cause: Cause) -> dict[str, Any]:
    """The user's call that reached a cause's line; empty if unknown, or if the cause is reported at this call."""
    node = cause.report.node if cause.report else None
    if node is None or is_installed(node.source_path or "") or (caller := _caller(node)) is None:
        return {}
    text = f"called from {(cause.worst.called_from or '').partition(' in ')[2]}"
    return {"relatedLocations": [{"id": 1, "physicalLocation": _physical(caller), "message": {"text": text}}]}


def _physical(place: Place, code: str | None = None) -> dict[str, Any]:
    snippet = {"snippet": {"text": code}} if code else {}
    region = {"startLine": place.line, "startColumn": place.column, "endLine": place.line, **snippet}
    return {"artifactLocation": {"uri": quote(place.file), "uriBaseId": "%SRCROOT%"}, "region": region}


def _location(cause: Cause, place: Place) -> dict[str, Any]:
    owners = dict.fromkeys(scope(finding.owner) for finding in (cause.worst, *cause.members))
    there = written_at(cause.worst.source)[1] == place.line  # false if the cause is reported at another line
    code = cause.report.node.code if cause.report and there else None
    logical = [{"fullyQualifiedName": name, "kind": "module"} for name in list(owners)[:MOST_LOCATIONS]]
    return {"physicalLocation": _physical(place, code), "logicalLocations": logical}


def _fingerprints(ordered: Sequence[Cause]) -> dict[Cause, str]:
    """A fingerprint for each cause, from its rule, module and operation, and the text of its source line.

    Line numbers, block numbers and measurements do not count, so that a cause keeps its fingerprint if other lines
    change. Causes with the same digest are numbered in the order of their lines.
    """
    seen: Counter[str] = Counter()
    prints = dict.fromkeys(ordered, "")
    for cause in sorted(ordered, key=lambda cause: written_at(cause.worst.source)):
        code = " ".join((cause.report.node.code or "").split()) if cause.report else ""
        parts = (cause.worst.rule, pattern(cause.worst.owner), cause.worst.op, code)
        digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        seen[digest] += 1
        prints[cause] = f"{digest}:{seen[digest]}"
    return prints
