"""plan.json: an Audit as plain data, versioned; the same audit gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..load import cautions
from ..records import FORMAT_VERSION, Baseline, Finding, FlaggedRegion, Magnitudes, NodeReport, Plan
from ..snippets.offer import shared_modules, tied_parameters
from .training import training_document

if TYPE_CHECKING:
    from ..records.audit import Audit


def to_document(audit: Audit) -> dict[str, Any]:
    """The contents of plan.json (DESIGN of the file: docs/plan-json.md). Non-finite numbers become null."""
    return {
        "format_version": FORMAT_VERSION,
        "subject": {
            "name": audit.subject.name,
            "source": audit.subject.target,
            "parameters": audit.parameters,
            "tied_parameters": [list(names) for names in tied_parameters(audit.subject.model)],
            "shared_modules": [list(paths) for paths in shared_modules(audit.subject.model)],
            "inputs": list(audit.inputs),
            "inputs_source": audit.subject.inputs_source,
            "weights_source": audit.subject.weights_source,
            "capture": audit.capture_method,
        },
        "environment": dict(vars(audit.environment)),
        "budget": {"max_error": audit.max_error, "metric": audit.metric},
        "recommended": audit.recommended,
        "recommendation": audit.recommendation,
        "plans": {name: _plan(plan) for name, plan in audit.plans.items()},
        "baselines": {
            name: {**_baseline(b), "rules_only": _rules_only(b.rules_only)} for name, b in audit.baselines.items()
        },
        "nodes": [_node(report, audit.formats) for report in audit.nodes],
        "weights": [{"name": w.name, "kind": w.kind, "range": _range(w.range)} for w in audit.weights],
        "regions": [_region(region) for region in audit.regions],
        "findings": [_finding(finding) for finding in audit.findings],
        "warnings": [*cautions(audit.subject), *audit.warnings],
        **({"training": training_document(audit.training)} if audit.training else {}),
    }


def _baseline(found: Baseline) -> dict[str, Any]:
    return {"measured_error": _number(found.measured_error), "finite": found.finite, "failure": found.failure}


def _rules_only(found: Baseline | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**_baseline(found), "low_precision_flops": _number(found.low_precision_flops)}


def _plan(plan: Plan) -> dict[str, Any]:
    checked = plan.verification
    return {
        "strategy": plan.strategy,
        "format": plan.format,
        "scopes": {
            path: {
                "precision": choice.precision,
                "because": list(choice.because),
                "output": choice.output,
                "cost": _number(choice.cost),
            }
            for path, choice in plan.scopes.items()
        },
        "predicted_error": _number(plan.predicted_error),
        "measured_error": _number(plan.measured_error),
        "worst_output_error": _number(checked.worst_output) if checked else None,
        "verified": plan.verified,
        "verified_on": checked.inputs if checked else None,
        "failure": checked.failure if checked else None,
        "low_precision_flops": _number(plan.low_precision_flops),
        "predicted_speedup": _number(plan.predicted_speedup),
        "target": plan.target,
        "predicted_memory": vars(plan.memory) if plan.memory else None,
        "fp32_memory": vars(plan.fp32_memory) if plan.fp32_memory else None,
        "pareto": [[_number(error), _number(time)] for error, time in plan.pareto],
    }


def _node(report: NodeReport, formats: tuple[str, ...]) -> dict[str, Any]:
    node = report.node
    return {
        "name": node.name,
        "op": node.op,
        "owner": node.owner,
        "source": node.source,
        "findings": list(report.findings),
        "flops": report.flops,
        "range": _range(report.range) if report.range else None,
        **{name: _judgement(report, name) for name in formats if name in report.verdicts},
    }


def _judgement(report: NodeReport, name: str) -> dict[str, Any]:
    verdict, error, contribution = report.verdicts[name], report.errors.get(name), report.contributions.get(name)
    measured: Mapping[str, Any] = vars(error) if error else {}
    return {
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "limited_by": verdict.limited_by,
        "exposed": list(report.exposed.get(name, ())),
        **{key: _number(value) if isinstance(value, float) else value for key, value in measured.items()},
        "contribution": _number(contribution.isolated) if contribution else None,
        "decided_by": contribution.decided_by if contribution else None,
    }


def _range(span: Magnitudes) -> dict[str, Any]:
    return {
        "max_abs": _number(span.max_abs),
        "min_abs": _number(span.min_abs),
        "zeros": _number(span.zero_share),
        "exponents": {str(exponent): count for exponent, count in span.exponents.items()},
    }


def _region(region: FlaggedRegion) -> dict[str, Any]:
    return {
        "format": region.format,
        "scope": region.scope,
        "nodes": list(region.nodes),
        "local_error": _number(region.local_error),
        "error": _number(region.error),
        "explained": _number(region.explained),
        "failure": region.failure,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "name": finding.name,
        "node": finding.node,
        "owner": finding.owner,
        "op": finding.op,
        "source": finding.source,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "formats": list(finding.formats),
        "message": finding.message,
        "evidence": {key: _plain(value) for key, value in finding.evidence.items()},
        "agrees": finding.agrees,
    }


def _number(value: float | None) -> float | None:
    """Seven significant digits: what is beyond them varies with the order of a reduction."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.7g}")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
