"""Rules confronted with the measurement: where the two differ, the measurement wins and the finding says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .records import Finding, Verdict


def confronted(findings: Sequence[Finding], verdicts: Mapping[str, Mapping[str, Verdict]]) -> tuple[Finding, ...]:
    """Findings with `agrees` filled in; a warning or error that the measurement does not bear out becomes info."""
    return tuple(_confront(finding, verdicts.get(finding.node, {})) for finding in findings)


def _confront(finding: Finding, verdicts: Mapping[str, Verdict]) -> Finding:
    measured = [verdicts[name].verdict for name in finding.formats if name in verdicts]
    measured = [verdict for verdict in measured if verdict != "untested"]
    if not measured:
        return finding
    agrees = any(verdict in ("unsafe", "sensitive") for verdict in measured)
    if agrees or finding.severity == "info":
        return replace(finding, agrees=agrees)
    return replace(finding, agrees=False, severity="info")
