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
from .paths import Place, callers, places, written_at
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
    where, called = places(audit), callers(audit)
    results = [
        {
            "ruleId": cause.worst.rule,
            "ruleIndex": list(rules).index(cause.worst.rule),
            "level": LEVELS[cause.severity],
            "message": {"text": _message(cause)},
            "occurrenceCount": len(cause.members),
            "locations": [_location(cause, where[cause.worst.node])],
            **_related(cause, called.get(cause.worst.node)),
            "partialFingerprints": {"primaryLocationLineHash": identity, "auditor/v1": identity},
        }
        for cause, identity in zip(found, _fingerprints(found), strict=True)
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
    told = f"**Why.** {finding.why.strip()}\n\n**What to do.** {finding.advice.strip()}"
    address = re.search(r"https://\S+", " ".join(finding.references))
    return {
        "id": finding.rule,
        "name": "".join(word.capitalize() for word in words.split()),
        "shortDescription": {"text": f"{words[0].upper()}{words[1:]}."},
        "fullDescription": {"text": (summary(finding.why) or words)[:LONGEST_TEXT]},
        "help": {"text": help_text, "markdown": told + (f"\n\n**References.**\n{sources}" if sources else "")},
        **({"helpUri": address[0]} if address else {}),
        "defaultConfiguration": {"level": LEVELS[finding.declared or finding.severity]},
        "properties": {
            "precision": finding.confidence,
            "problem.severity": PROBLEMS[finding.declared or finding.severity],
            "tags": ["precision", *finding.formats],
        },
    }


def _message(cause: Cause) -> str:
    worst = cause.worst
    place = f"In {cause.where} ({op(worst.op)}), {', '.join(map(label, cause.formats))}."
    at = f"Written at {line(worst.source, worst.called_from)}." if worst.called_from else ""
    return " ".join(filter(None, (sentence(worst.message), place, at, sentence(cause.size), cause.bearing)))


def _related(cause: Cause, caller: Place | None) -> dict[str, Any]:
    """The call that led to the line of a finding, which a viewer links to."""
    if caller is None:
        return {}
    region = {"startLine": caller.line, "startColumn": 1, "endLine": caller.line}
    text = f"called from {(cause.worst.called_from or '').partition(' in ')[2]}"
    return {"relatedLocations": [{"id": 1, "physicalLocation": _physical(caller, region), "message": {"text": text}}]}


def _physical(place: Place, region: dict[str, Any]) -> dict[str, Any]:
    return {"artifactLocation": {"uri": quote(place.file), "uriBaseId": "%SRCROOT%"}, "region": region}


def _location(cause: Cause, place: Place) -> dict[str, Any]:
    owners = dict.fromkeys(scope(finding.owner) for finding in (cause.worst, *cause.members))
    region: dict[str, Any] = {"startLine": place.line, "startColumn": 1, "endLine": place.line}
    there = written_at(cause.worst.source)[1] == place.line  # not where the finding was moved to the audited file
    if cause.report and there and (code := cause.report.node.code):
        region["snippet"] = {"text": code}
    logical = [{"fullyQualifiedName": name, "kind": "module"} for name in list(owners)[:MOST_LOCATIONS]]
    return {"physicalLocation": _physical(place, region), "logicalLocations": logical}


def _fingerprints(found: Sequence[Cause]) -> list[str]:
    """One per result: of the rule, the module, the operation and the source line's text.

    Neither line numbers, block counts nor measurements enter, so a result keeps its identity while the file around it
    changes. Results that are alike in all of this are numbered in the order of their lines.
    """
    seen: Counter[str] = Counter()
    prints: dict[int, str] = {}
    for i in sorted(range(len(found)), key=lambda i: written_at(found[i].worst.source)):
        worst, report = found[i].worst, found[i].report
        code = " ".join((report.node.code or "").split()) if report else ""
        parts = (worst.rule, pattern(worst.owner), worst.op, code)
        digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        seen[digest] += 1
        prints[i] = f"{digest}:{seen[digest]}"
    return [prints[i] for i in range(len(found))]
