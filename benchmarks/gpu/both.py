"""One audit on the CPU and one on the GPU, and how they differ: errors, verdicts, plans."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

from auditor import Audit
from auditor.flow import run
from auditor.loading import load
from auditor.records import NodeError, Subject
from auditor.settings import Settings
from benchmarks.gpu.machine import ROOT
from tests.pretend_gpu.same import differences

Row = dict[str, Any]


def options(device: str, **how: Any) -> Settings:
    """Those of `python -m auditor` without arguments. how: fields of Settings."""
    return Settings(command="benchmarks.gpu", device=device, **how)


def example(name: str) -> Subject:
    """One of the examples, as the command line loads it."""
    return load(str(ROOT / "examples" / name))


def compared(subject: Subject, device: str, **how: Any) -> Row:
    """The audit of a subject on both, in figures."""
    start = time.perf_counter()
    emulated = run(subject, options("cpu", **how))
    between = time.perf_counter()
    native = run(subject, options(device, **how))
    return {
        "nodes": len(native.nodes),
        "execution": native.environment.execution,
        "memory": list(getattr(native.environment, "memory", ())),
        "seconds": {"emulated": between - start, "native": time.perf_counter() - between},
        "ratios": {fmt: spread(_ratios(emulated, native, fmt)) for fmt in emulated.formats},
        "verdicts": _changes(emulated, native),
        "plans": _plans(emulated, native),
        "recommended": [emulated.recommended, native.recommended],
        "differences": differences(emulated, native)[:20],
    }


def spread(ratios: list[float]) -> Row:
    """How many there are, their median, and where nine tenths of them lie."""
    if len(ratios) < 2:
        return {"count": len(ratios), "median": ratios[0] if ratios else None, "low": None, "high": None}
    twentieths = statistics.quantiles(ratios, n=20)
    return {"count": len(ratios), "median": statistics.median(ratios), "low": twentieths[0], "high": twentieths[-1]}


def ratios_of(emulated: Mapping[Any, NodeError], native: Mapping[Any, NodeError]) -> list[float]:
    """Emulated over native error of every operation that both have one of."""
    found = []
    for key in emulated.keys() & native.keys():
        ours, theirs = emulated[key].local_error, native[key].local_error
        if ours and theirs and math.isfinite(ours) and math.isfinite(theirs):
            found.append(ours / theirs)
    return found


def _ratios(emulated: Audit, native: Audit, fmt: str) -> list[float]:
    ours, theirs = (
        {report.node.name: report.errors[fmt] for report in audit.nodes if fmt in report.errors}
        for audit in (emulated, native)
    )
    return ratios_of(ours, theirs)


def _changes(emulated: Audit, native: Audit) -> list[str]:
    """Operations whose verdicts differ, with both."""
    known = {report.node.name: report.verdicts for report in native.nodes}
    return [
        f"{report.node.name} in {fmt}: {ours.verdict}, natively {known[report.node.name][fmt].verdict}"
        for report in emulated.nodes
        for fmt, ours in report.verdicts.items()
        if report.node.name in known and known[report.node.name][fmt].verdict != ours.verdict
    ]


def _plans(emulated: Audit, native: Audit) -> Row:
    return {
        name: {
            "error": [ours.measured_error, theirs.measured_error],
            "verified": [ours.is_verified, theirs.is_verified],
            "failure": theirs.verification.failure if theirs.verification else None,
        }
        for name, ours in emulated.plans.items()
        if (theirs := native.plans.get(name)) is not None
    }
