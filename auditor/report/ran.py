"""What operations read, compute in and give under the recommended plan, as people write it, and why that is FP32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..formats.table import FORMATS
from ..ops.table import operation
from ..records import Node, NodeReport, Plan
from ..strategies import strategy_of
from .view import precision_of
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


def raised_by_autocast(node: Node) -> bool:
    """Whether autocast on CUDA runs an operation in FP32 whatever it reads; not where the author switched it off."""
    listed = node.floating and operation(node.op).autocast in ("fp32", "fp32_unless_dtype")
    return listed and not node.in_place and (node.region is None or node.region.enabled)


def why_raised(report: NodeReport, plan: Plan) -> str:
    """Why an operation computes in FP32 under a plan that lowers something; nothing for those that do not."""
    ran = report.planned
    if ran is None or _NAMES.get(ran.computed) != "fp32":
        return ""
    node, regional = report.node, strategy_of(plan.strategy).regional
    if precision_of(node.owner, plan) == "fp32":
        words = next((reason.words for reason in plan.reasons if node.owner in reason.modules), None)
        return KEPT if words is None else f"{KEPT}: {words}"
    reads = {_NAMES[dtype] for dtype in ran.inputs if dtype in _NAMES}
    if regional and node.region is not None and not node.region.enabled:
        return "the author switched autocast off here"
    if regional and raised_by_autocast(node):
        return "autocast computes it in FP32 by itself"
    if any(FORMATS[name].low for name in reads):
        mixed = " and ".join(sorted(label(name) for name in reads))
        return f"it reads {mixed}, which torch promotes to FP32" if "fp32" in reads else "its author asks for FP32"
    if not reads:
        return "it reads no floating tensor, and makes FP32"
    if not regional:
        return "all it reads is FP32"
    return "all it reads is FP32, and autocast leaves " + (
        "what is done in place as it is" if node.in_place else "this operation as it is"
    )
