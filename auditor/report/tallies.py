"""How many operations are safe, sensitive and unsafe in a format, and what limits them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import torch

from ..numerics.formats import FORMATS
from ..records import NodeReport
from ..records.audit import Audit
from .nonfinite import nonfinite_runs
from .words import VERDICTS, count, label


@dataclass(frozen=True)
class Tally:
    """How many operations of each verdict one format has.

    limit: what limits those that are not safe, `overflow and precision`. cast_only: unsafe ones that only cast weights run
    low, since autocast keeps them in FP32. together: whether a run of the whole model turns non-finite.
    """

    label: str
    counts: dict[str, int]
    total: int
    limit: str
    cast_only: int
    together: bool

    @property
    def sentence(self) -> str:
        """All of it."""
        unsafe, sensitive, untested = (self.counts[name] for name in ("unsafe", "sensitive", "untested"))
        left = f"; {untested:,} {'was' if untested == 1 else 'were'} not tested" if untested else ""
        if untested == self.total:
            return f"{self.label} was not tested on any operation."
        if not unsafe and not sensitive:
            tested = f"{count(self.total - untested, 'operation')}{' tested' if untested else ''}"
            alone = " alone" if self.together else ""
            return f"{self.label}: none of the {tested} is unsafe or sensitive{alone}{left}."
        some = "" if self.cast_only == unsafe else f"{self.cast_only:,} "
        where = f" ({some}only with cast weights)" if self.cast_only else ""
        cause = f", limited by {self.limit}" if self.limit else ""
        total = count(self.total, "operation")
        return f"{self.label}: {unsafe:,} unsafe{where} and {sensitive:,} sensitive of {total}{cause}{left}."


def tally_of(audit: Audit, fmt: str) -> Tally:
    """Of the operations in one format."""
    runs = [run for run in nonfinite_runs(audit) if run.format == fmt]
    vanished = {run.first.node for run in runs if run.first is not None and run.first.cause == "underflow"}
    judged = [node for node in audit.nodes if fmt in node.verdicts]
    counts = Counter(node.verdicts[fmt].verdict for node in judged)
    limits = Counter(
        _limit(node, fmt, vanished) for node in judged if node.verdicts[fmt].verdict in ("sensitive", "unsafe")
    )
    wider = FORMATS[fmt].smallest_normal > torch.finfo(torch.float32).tiny
    words = {
        "overflow": "overflow",
        "underflow": "underflow (BF16 has FP32's range)" if wider else "underflow",
        "precision": "precision",
        "literal": f"literals that {label(fmt)} cannot hold",
        "kernel": "missing kernels",
        "other": "operations that raise",
    }
    kinds = [text for key, text in words.items() if limits[key]]
    return Tally(
        label(fmt),
        {name: counts[name] for name in VERDICTS},
        len(judged),
        " and ".join(filter(None, (", ".join(kinds[:-1]), *kinds[-1:]))),
        sum(node.verdicts[fmt].verdict == "unsafe" and node.exposed.get(fmt) == ("cast",) for node in judged),
        bool(runs),
    )


def _limit(report: NodeReport, fmt: str, vanished: set[str]) -> str:
    """What limits an operation that is not safe: `other` is what raises for no reason that is known."""
    error, verdict = report.errors.get(fmt), report.verdicts[fmt]
    if error is not None and error.unsupported and verdict.verdict == "unsafe":
        by_kernel = re.search(r"\bkernel\b", error.unsupported)
        return "literal" if verdict.limited_by == "range" else "kernel" if by_kernel else "other"
    if (error is not None and error.cause == "underflow") or report.node.name in vanished:
        return "underflow"
    return {"range": "overflow"}.get(verdict.limited_by or "", verdict.limited_by or "")
