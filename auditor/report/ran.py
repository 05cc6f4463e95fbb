"""What operations read, compute in and give under the recommended plan, as people write it, and why that is FP32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ..numerics.formats import FORMATS
from ..records import Dtypes, NodeReport, Plan
from .kept import precision_of
from .words import label

_NAMES = {row.storage: name for name, row in FORMATS.items() if row.native and row.storage}
"""{torch's name of a dtype: that of the format it computes in}."""

KEPT = "its module stays FP32"


def dtype_label(dtype: str) -> str:
    """`float16` -> `FP16`; a dtype that is no format keeps torch's name: `int64`."""
    return label(_NAMES[dtype]) if dtype in _NAMES else dtype


def computed_in(report: NodeReport) -> str | None:
    """Name of the format that an operation computes in under the plan; None for discrete ones, and where it is not known."""
    return _NAMES.get(report.planned.computed) if report.planned else None


def tally(reports: Iterable[NodeReport]) -> str:
    """What operations compute in, in words: `FP16`, or `FP16 3 times and FP32 once`; nothing where it is not known."""
    found = Counter(label(name) for report in reports if (name := computed_in(report)) is not None)
    if len(found) < 2:
        return "".join(found)
    return " and ".join(f"{name} {'once' if n == 1 else f'{n:,} times'}" for name, n in found.most_common())


def why_raised(plan: Plan) -> Callable[[NodeReport], str]:
    """Says why an operation computes in FP32 under a plan that lowers something; nothing of those that do not."""
    modules = {path: reason.words for reason in plan.reasons for path in reason.modules}
    operations = {name: reason.words for reason in plan.reasons for name in reason.operations}

    def why(report: NodeReport) -> str:
        node, ran = report.node, report.planned
        if ran is None or _NAMES.get(ran.computed) != "fp32":
            return ""
        if precision_of(node.owner, plan) == "fp32":
            return f"{KEPT}: {modules[node.owner]}" if node.owner in modules else KEPT
        return operations.get(node.name) or _promoted(ran)

    return why


def _promoted(ran: Dtypes) -> str:
    """Of an operation whose result is low all the same, such as a batch norm with FP32 statistics."""
    reads = {_NAMES[dtype] for dtype in ran.inputs if dtype in _NAMES}
    mixed = len(reads) > 1 and "fp32" in reads
    return (
        f"it reads {' and '.join(sorted(map(label, reads)))} together, and computes in the wider one" if mixed else ""
    )
