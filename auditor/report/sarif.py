"""SARIF 2.1.0, as GitHub's code scanning wants it."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from ..paths import pattern
from ..records import Finding
from ..records.audit import Audit
from .findings import Cause, causes
from .paths import Place, callers, places
from .words import label, line, op, scope, sentence, summary

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "info": "note"}
PROBLEMS = {"error": "error", "warning": "warning", "info": "recommendation"}
MOST_RESULTS = 5000
MOST_LOCATIONS = 100
LONGEST_TEXT = 1000


def sarif(audit: Audit) -> str:
    """One run with its rules and results; equal audits give equal bytes."""
    found = causes(audit).all[:MOST_RESULTS]
    rules = {cause.worst.rule: cause.worst for cause in reversed(found)}
    run = {
        "tool": {"driver": _driver(audit, list(rules.values()))},
        "automationDetails": {"id": f"precision-auditor/{quote(audit.subject.name, safe='')}/"},
        "columnKind": "utf16CodeUnits",
        "results": _results(audit, found, list(rules)),
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _driver(audit: Audit, examples: list[Finding]) -> dict[str, Any]:
    return {
        "name": "Model precision auditor",
        "semanticVersion": audit.environment.auditor,
        "rules": [_rule(finding) for finding in examples],
    }


def _rule(finding: Finding) -> dict[str, Any]:
    words = finding.name.replace("-", " ").replace("_", " ").strip() or finding.rule
    help_text = "\n\n".join(part.strip() for part in (finding.why, finding.advice) if part.strip()) or words
    return {
        "id": finding.rule,
        "name": "".join(word.capitalize() for word in words.split()),
        "shortDescription": {"text": f"{words[0].upper()}{words[1:]}."},
        "fullDescription": {"text": (summary(finding.why) or words)[:LONGEST_TEXT]},
        "help": {
            "text": help_text,
            "markdown": f"**Why.** {finding.why.strip()}\n\n**What to do.** {finding.advice.strip()}{_sources(finding)}",
        },
        **_help_uri(finding),
        "defaultConfiguration": {"level": LEVELS[finding.declared or finding.severity]},
        "properties": {
            "precision": finding.confidence,
            "problem.severity": PROBLEMS[finding.declared or finding.severity],
            "tags": ["precision", *finding.formats],
        },
    }


def _sources(finding: Finding) -> str:
    return (
        "".join(["\n\n**References.**\n", *(f"\n- {item}" for item in finding.references)])
        if finding.references
        else ""
    )


def _help_uri(finding: Finding) -> dict[str, str]:
    """The first address among the rule's references."""
    found = re.search(r"https://\S+", " ".join(finding.references))
    return {"helpUri": found[0]} if found else {}


def _results(audit: Audit, found: Sequence[Cause], rules: list[str]) -> list[dict[str, Any]]:
    where, called = places(audit), callers(audit)
    return [
        {
            "ruleId": cause.worst.rule,
            "ruleIndex": rules.index(cause.worst.rule),
            "level": LEVELS[cause.severity],
            "message": {"text": _message(cause)},
            "occurrenceCount": len(cause.members),
            "locations": [_location(cause, where[cause.worst.node])],
            **_related(cause, called.get(cause.worst.node)),
            "partialFingerprints": {"primaryLocationLineHash": identity, "auditor/v1": identity},
        }
        for cause, identity in zip(found, _fingerprints(found), strict=True)
    ]


def _message(cause: Cause) -> str:
    worst = cause.worst
    formats = ", ".join(map(label, cause.formats))
    place = f"In {cause.where} ({op(worst.op)}), {formats}."
    at = f"Written at {line(worst.source, worst.called_from)}." if worst.called_from else ""
    return " ".join(filter(None, (sentence(worst.message), place, at, sentence(cause.size), cause.bearing)))


def _related(cause: Cause, caller: Place | None) -> dict[str, Any]:
    """The call that led to the line of a finding, which a viewer links to."""
    if caller is None:
        return {}
    physical = {
        "artifactLocation": {"uri": quote(caller.file), "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": caller.line, "startColumn": 1, "endLine": caller.line},
    }
    function = (cause.worst.called_from or "").partition(" in ")[2]
    text = f"called from {function}"
    return {"relatedLocations": [{"id": 1, "physicalLocation": physical, "message": {"text": text}}]}


def _location(cause: Cause, place: Place) -> dict[str, Any]:
    owners = dict.fromkeys(scope(finding.owner) for finding in (cause.worst, *cause.members))
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(place.file), "uriBaseId": "%SRCROOT%"},
            "region": _region(cause, place),
        },
        "logicalLocations": [{"fullyQualifiedName": name, "kind": "module"} for name in list(owners)[:MOST_LOCATIONS]],
    }


def _region(cause: Cause, place: Place) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": place.line, "startColumn": 1, "endLine": place.line}
    there = _line(cause)[1] == place.line  # not where the finding was moved to the audited file
    code = cause.report.node.code if cause.report and there else None
    return {**region, "snippet": {"text": code}} if code else region


def _fingerprints(found: Sequence[Cause]) -> list[str]:
    """One per result: of the rule, the module, the operation and the source line's text.

    Neither line numbers, block counts nor measurements enter, so a result keeps its identity while the file around it
    changes. Results that are alike in all of this are numbered in the order of their lines.
    """
    seen: Counter[str] = Counter()
    prints: dict[int, str] = {}
    for i in sorted(range(len(found)), key=lambda i: _line(found[i])):
        worst, report = found[i].worst, found[i].report
        code = " ".join((report.node.code or "").split()) if report else ""
        parts = (worst.rule, pattern(worst.owner), worst.op, code)
        digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        seen[digest] += 1
        prints[i] = f"{digest}:{seen[digest]}"
    return [prints[i] for i in range(len(found))]


def _line(cause: Cause) -> tuple[str, int]:
    name, _, line = (cause.worst.source or "").rpartition(":")
    return name, int(line) if line.isdecimal() else 0
