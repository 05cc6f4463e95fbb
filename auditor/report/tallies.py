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
    """How many operations of each verdict one format has, and what limits those that are not safe.

    together: whether a run of the whole model in the format turns non-finite.
    """

    format: str
    label: str
    counts: tuple[tuple[str, int], ...]
    total: int
    by_range: int
    by_precision: int
    cast_only: int = 0
    by_literal: int = 0
    without_kernel: int = 0
    refused: int = 0
    by_underflow: int = 0
    together: bool = False

    @property
    def unsafe(self) -> int:
        """Operations that must not run in the format."""
        return dict(self.counts).get("unsafe", 0)

    @property
    def limit(self) -> str:
        """What limits any operation, `overflow and precision`; nothing where none is limited."""
        wider = FORMATS[self.format].smallest_normal > torch.finfo(torch.float32).tiny
        found = (
            ("overflow", self.by_range - self.by_underflow),
            ("underflow (BF16 has FP32's range)" if wider else "underflow", self.by_underflow),
            ("precision", self.by_precision),
            (f"literals that {self.label} cannot hold", self.by_literal),
            ("missing kernels", self.without_kernel),
            ("operations that raise", self.refused),
        )
        kinds = [kind for kind, number in found if number]
        return " and ".join(filter(None, (", ".join(kinds[:-1]), *kinds[-1:])))


def tally_of(audit: Audit, fmt: str) -> Tally:
    """Of the operations in one format."""
    runs = [run for run in nonfinite_runs(audit) if run.format == fmt]
    vanished = {run.first.node for run in runs if run.first is not None and run.first.cause == "underflow"}
    verdicts = [node.verdicts[fmt] for node in audit.nodes if fmt in node.verdicts]
    counts = Counter(v.verdict for v in verdicts)
    refused = Counter(_refusal(node, fmt) for node in audit.nodes)
    flagged = [
        node
        for node in audit.nodes
        if fmt in node.verdicts and node.verdicts[fmt].verdict in ("sensitive", "unsafe") and not _refusal(node, fmt)
    ]
    limited = Counter(node.verdicts[fmt].limited_by for node in flagged)
    return Tally(
        fmt,
        label(fmt),
        tuple((name, counts[name]) for name in VERDICTS),
        len(verdicts),
        limited["range"],
        limited["precision"],
        _cast_only(audit, fmt),
        refused["literal"],
        refused["kernel"],
        refused["other"],
        sum(_underflows(node, fmt) or node.node.name in vanished for node in flagged),
        bool(runs),
    )


def _underflows(report: NodeReport, fmt: str) -> bool:
    return fmt in report.errors and report.errors[fmt].cause == "underflow"


def _refusal(report: NodeReport, fmt: str) -> str:
    """What stands in the way of an operation that does not run in the format: `literal`, `kernel`, `other`, or nothing."""
    said = report.errors[fmt].unsupported if fmt in report.errors else None
    if not said or fmt not in report.verdicts or report.verdicts[fmt].verdict != "unsafe":
        return ""
    if report.verdicts[fmt].limited_by == "range":
        return "literal"
    return "kernel" if re.search(r"\bkernel\b", said) else "other"


def _cast_only(audit: Audit, fmt: str) -> int:
    """Unsafe operations that only a model with cast weights runs low; autocast keeps them in FP32 by itself."""
    unsafe = [node for node in audit.nodes if fmt in node.verdicts and node.verdicts[fmt].verdict == "unsafe"]
    return sum(node.exposed.get(fmt) == ("cast",) for node in unsafe)


def contrast(tally: Tally) -> str:
    """The same in a sentence."""
    counts = dict(tally.counts)
    if counts["untested"] == tally.total:
        return f"{tally.label} was not tested on any operation."
    if not counts["unsafe"] and not counts["sensitive"]:
        tested = f"{count(tally.total - counts['untested'], 'operation')}{' tested' if counts['untested'] else ''}"
        alone = " alone" if tally.together else ""
        return f"{tally.label}: none of the {tested} is unsafe or sensitive{alone}{_untested(counts['untested'])}."
    cause = f", limited by {tally.limit}" if tally.limit else ""
    some = "" if tally.cast_only == counts["unsafe"] else f"{tally.cast_only:,} "
    where = f" ({some}only with cast weights)"
    return (
        f"{tally.label}: {counts['unsafe']:,} unsafe{where if tally.cast_only else ''} and {counts['sensitive']:,} "
        f"sensitive of {count(tally.total, 'operation')}{cause}{_untested(counts['untested'])}."
    )


def _untested(number: int) -> str:
    return f"; {number:,} {'was' if number == 1 else 'were'} not tested" if number else ""
