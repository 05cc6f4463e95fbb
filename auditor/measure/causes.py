"""Classifies the causes of errors in nodes and in low-precision weights; finds the values shortly before a
discontinuity, such as a discrete result or a division."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..isolation.members import size_of
from ..numerics.formats import FORMATS, Format, label
from ..numerics.histogram import Deviation, Profile, merge_magnitudes
from ..numerics.nodes import row_of
from ..numerics.operations import operation
from ..records import Capture, Contribution, Magnitudes, NodeError, Subject

_STEPS = 3


def cause_of(
    op: str,
    gap: Deviation,
    fmt: Format,
    result: Profile,
    inputs: Sequence[Profile],
    divisor: Profile | None = None,
    divides: bool = False,
) -> str | None:
    """overflow | nan | underflow | cancellation | rounding; None for an exact result.

    divisor: the operand of a division, logarithm or inverse root, whose smallest entries matter most. divides: whether
    another operation divides by this result.

    overflow: of the result, or of an input, which can turn entries of the result into zero. underflow: values so small
    that the format rounds them to zero or stores them with fewer bits; also Inf and NaN from a divisor that became zero,
    if the exact result would fit. cancellation: the result of a subtraction or similar operation is over eight times
    smaller (in RMS) than an operand, with an error above eight unit roundoffs. Source: Higham, section 1.7.
    """
    smallest = divisor.range.min_abs if divisor is not None else 0.0
    if (gap.overflow or gap.nan) and 0 < smallest <= fmt.smallest_subnormal / 2 and result.range.max_abs <= fmt.largest:
        return "underflow"
    if gap.overflow:
        return "overflow"
    if gap.nan:
        return "nan"
    if gap.error == 0:
        return None
    if divides and (gap.underflow or gap.subnormal >= 0.01):
        return "underflow"
    if 0 < smallest < fmt.smallest_normal and gap.error > fmt.epsilon:
        return "underflow"
    if gap.underflow >= 0.01 and gap.error > fmt.epsilon and result.range.min_abs < fmt.smallest_normal:
        return "underflow"
    overflows = any(profile.range.max_abs > fmt.largest for profile in inputs)
    became_zero = gap.underflow > 0 and result.range.min_abs >= fmt.smallest_normal
    if overflows and (gap.error > 8 * fmt.epsilon or became_zero):
        return "overflow"
    if operation(op).cancels and gap.error > 8 * fmt.epsilon / 2:
        largest = max((profile.rms for profile in inputs), default=0.0)
        return "cancellation" if largest > 8 * result.rms else "rounding"
    return "rounding"


def refine_causes(
    errors: Mapping[str, Mapping[str, NodeError]], contributions: Mapping[str, Mapping[str, Contribution]]
) -> dict[str, dict[str, NodeError]]:
    """Change the cause rounding to underflow if entries underflowed and outputs turned non-finite without overflow.
    Underflow before a division can turn outputs Inf or NaN; rounding cannot."""

    def refine(error: NodeError, effect: Contribution | None) -> NodeError:
        if effect is None or math.isfinite(effect.isolated):
            return error
        if error.cause != "rounding" or not error.underflow or error.overflow or error.nan:
            return error
        return replace(error, cause="underflow")

    result = dict[str, dict[str, NodeError]]()
    for name, formats in errors.items():
        effects = contributions[name]
        result[name] = {fmt: refine(error, effects.get(fmt)) for fmt, error in formats.items()}
    return result


def breaks(error: NodeError, contribution: Contribution | None) -> bool:
    """Whether an operation does not support a format, or makes its result or the outputs Inf or NaN."""
    broken = error.unsupported is not None or error.overflow + error.nan > 0
    return broken or (contribution is not None and not math.isfinite(contribution.isolated))


def deciding_nodes(capture: Capture) -> set[str]:
    """Floating-point nodes at most three operations before a discrete result; all if every output is discrete."""
    nodes = capture.nodes
    if not any(name not in nodes or nodes[name].floating for name in capture.outputs):
        return {name for name, node in nodes.items() if node.floating}
    rows = ((node, operation(node.op)) for node in nodes.values() if not node.floating)
    discrete = [node for node, row in rows if not (row.asks_shape or row.asks_finite)]
    return _upstream(capture, {name for node in discrete for name in node.inputs})


def guarding_nodes(capture: Capture) -> set[str]:
    """Floating-point nodes at most three operations before an operation that is singular at zero, such as log."""
    return _upstream(capture, {value.name for n in capture.graph_module.graph.nodes for value in divisors(n)})


def divisors(node: fx.Node) -> list[fx.Node]:
    """[the operand that the node divides by, or takes a logarithm or an inverse root of]; [] for other nodes."""
    if node.op != "call_function":
        return []
    row = row_of(node)
    if row.packet == "pow" and len(node.args) > 1 and isinstance(node.args[1], (int, float)) and node.args[1] < 0:
        position: int | None = 0
    else:
        position = row.singular
    value = node.args[position] if position is not None and len(node.args) > position else None
    return [value] if isinstance(value, fx.Node) else []


def _upstream(capture: Capture, names: set[str]) -> set[str]:
    """The floating-point nodes among `names` and up to two operations upstream of them."""
    nodes, result = capture.nodes, set[str]()
    for _ in range(_STEPS):
        names = {name for name in names if name in nodes and nodes[name].floating}
        result |= names
        names = {source for name in names for source in nodes[name].inputs}
    return result


def storage_notes(
    subject: Subject, capture: Capture, ranges: Mapping[str, Magnitudes], formats: tuple[str, ...]
) -> tuple[str, ...]:
    """A note per format on weights stored in low precision; () if all weights are FP32, or stay low in the audit."""
    if not subject.stored_low or subject.upcast == "kept":
        return ()
    total = size_of(subject.model)
    stored = {row.name: count for row in FORMATS.values() if (count := subject.stored_low.get(row.storage or "", 0))}
    read = [ranges[p.name] for p in capture.placeholders if p.kind == "parameter" and p.name in ranges]
    return tuple(_of(FORMATS[fmt], stored, total, merge_magnitudes(read)) for fmt in formats)


def _of(fmt: Format, stored: Mapping[str, int], total: int, magnitudes: Magnitudes) -> str:
    name = label(fmt.name)
    if fmt.name in stored:
        share = "all" if stored[fmt.name] == total else f"{stored[fmt.name]:,} of {total:,}"
        return f"The model stores {share} weights in {name}, so rounding these weights adds no error in {name}."
    above = math.floor(math.log2(fmt.largest)) + 1
    large = sum(count for exponent, count in magnitudes.exponents.items() if exponent >= above)
    small = sum(count for exponent, count in magnitudes.exponents.items() if exponent < fmt.min_exponent)
    came = " and ".join(map(label, stored))
    if not large and not small:
        fits = fmt.mantissa >= max(FORMATS[source].mantissa for source in stored) and sum(stored.values()) == total
        if fits:
            return f"The model stores its weights in {came}, and {name} represents all of these weights exactly."
        return f"The model stores weights in {came}. All lie in {name}'s range; rounding them adds error in {name}."
    becomes = "infinite" if fmt.overflows_to == "inf" else "its largest number"
    return (
        f"The model stores weights in {came}, which has a wider range than {name}. Of {magnitudes.nonzero + magnitudes.zeros:,} "
        f"weights, {large:,} are {2.0**above:,.0f} or more and become {becomes} in {name}; {small:,} are below "
        f"{fmt.smallest_normal:.2g}, where {name} has fewer bits or only zero."
    )
