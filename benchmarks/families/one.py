"""One model of one library, audited in this process: what a row of the table says."""

from __future__ import annotations

import math
import re
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

import auditor
from auditor.errors import AuditorError
from auditor.records import Audit

from . import Unbuilt, library

Row = dict[str, Any]
_FOLDERS = re.compile(r"(?<![:/\w])/[^\s'\"]*/(?=[^\s'\"/]+)")
"""The folders of an absolute path, up to its last part."""
LOW = 0.95
"""Share of the FLOPs from which on a plan counts as low."""


def row_of(library_name: str, name: str, begun: Callable[[str], None]) -> Row:
    """What became of the model: built, forward run, captured, measured, verified; and why not, in one line.

    begun: hears of each stage of the audit.
    """
    row: Row = {"library": library_name, "model": name, "outcome": "unbuilt"}
    try:
        torch.manual_seed(0)
        model, args, kwargs = library(library_name).build(name)
        row |= {"class": type(model).__name__, "forward_seconds": round(_forward(model, args, kwargs), 4)}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return row | {"reason": _line(error)}
    start = time.process_time()
    try:
        audit = auditor.audit(model, args, kwargs=kwargs, device="cpu", progress=lambda stage, *_: begun(stage))
    except AuditorError as error:
        return row | {"outcome": "refused", "reason": f"{error.slug}: {_line(error)}"} | _spent(start)
    except Exception as error:
        return row | {"outcome": "internal", "reason": _line(error), "where": _where(error)} | _spent(start)
    return row | {"outcome": "audited"} | _said(audit) | _spent(start)


def _forward(model: torch.nn.Module, args: Any, kwargs: Any) -> float:
    def once() -> float:
        start = time.process_time()
        with torch.no_grad():
            model(*args, **kwargs)
        return time.process_time() - start

    once()
    return min(once() for _ in range(2))


def _said(audit: Audit) -> Row:
    plans = audit.plans.values()
    verified = [plan for plan in plans if plan.is_verified]
    plain = {name: base for name, base in audit.baselines.items() if name.startswith("autocast") and base.finite}
    errors = {name: base.measured_error for name, base in plain.items()}
    best = max(verified, key=lambda plan: plan.low_precision_flops, default=None)
    held = [name for name, error in errors.items() if error is not None and error <= audit.max_error]
    return {
        "nodes": len(audit.nodes),
        "measured": sum(bool(node.errors) for node in audit.nodes),
        "untested": _untested(audit),
        "plans": len(plans),
        "verified": len(verified),
        "failed": sorted({f"{p.name}: {_failure(p)}" for p in plans if not p.is_verified}),
        "low_flops": round(best.low_precision_flops, 4) if best else None,
        "recommended": audit.recommended,
        "autocast_holds": bool(held),
        "autocast_error": min((e for e in errors.values() if e is not None and math.isfinite(e)), default=None),
        "warnings": list(audit.warnings[:3]),
    }


def _untested(audit: Audit) -> list[str]:
    """Some of the reasons why an operation was not measured."""
    verdicts = [verdict for node in audit.nodes for verdict in node.verdicts.values()]
    return sorted({verdict.reason for verdict in verdicts if verdict.verdict == "untested"})[:3]


def _failure(plan: Any) -> str:
    failure = plan.verification.failure if plan.verification else plan.note
    return str(failure or f"error {plan.measured_error}")[:200]


def _spent(start: float) -> Row:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_seconds": round(time.process_time() - start, 1), "peak_mib": round(peak)}


def _line(error: BaseException) -> str:
    """The first line, with the type where the user would not see one line, and no folder of this machine."""
    text = _FOLDERS.sub("", (str(error).strip().splitlines() or [""])[0])[:240]
    return text if isinstance(error, AuditorError | Unbuilt) else f"{type(error).__name__}: {text}"


def _where(error: BaseException) -> str:
    """The innermost frame of the auditor."""
    found, trace = "", error.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        if "/auditor/" in code.co_filename:
            found = f"{code.co_filename.rpartition('/auditor/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
