"""Model inputs that do not fit a format: the columns in question, and the findings of the rules about inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from ..execution.policy import Policy, plain
from ..execution.resolve import is_low
from ..numerics.entries import is_plain
from ..numerics.formats import FORMATS, Format, label
from ..records import Capture, Finding, Subject, Verdict
from .findings import FLAGGED, finding_of
from .rule import Rule

OVERFLOWS, UNDERFLOWS = "INP001", "INP002"
INPUT_OP = "auditor.input"
"""Operation of a finding on an input of the model."""
NAMED = 4
"""Number of columns that a finding names."""
WHERE = {
    ("autocast", "cast"): "under autocast and with cast weights",
    ("autocast",): "under autocast (not with cast weights)",
    ("cast",): "with cast weights (not under autocast)",
}
"""{strategies that cast an input to low precision: in words}."""


@dataclass(frozen=True)
class InputMagnitudes:
    """Magnitudes of one floating-point input, over all batches. axis: column | channel, or "" if there is only
    one magnitude, of the whole input.

    largest: largest finite magnitude of each column or channel; 0 if all its values are zero.
    """

    name: str
    axis: str
    largest: tuple[float, ...]


def input_magnitudes(capture: Capture, subject: Subject) -> tuple[InputMagnitudes, ...]:
    """The ranges of the floating-point inputs of the graph."""
    by_input: dict[str, list[torch.Tensor]] = {}
    for path, batches in [(one.capture, one.batches) for one in capture.paths] or [(capture, subject.batches)]:
        names = {place.name: capture.twins.get(place.name, place.name) for place in path.placeholders}
        inputs = [place.kind == "input" for place in path.placeholders]
        for batch in batches:
            for place, is_input, value in zip(path.placeholders, inputs, path.bind(subject.model, batch), strict=True):
                if is_input and isinstance(value, torch.Tensor) and _has_a_range(value):
                    by_input.setdefault(names[place.name], []).append(value.detach())
    return tuple(_range_of(name, values) for name, values in by_input.items())


def _has_a_range(x: torch.Tensor) -> bool:
    return x.is_floating_point() and is_plain(x) and x.numel() > 0


def _range_of(name: str, values: Sequence[torch.Tensor]) -> InputMagnitudes:
    """The range per column (the last axis) or per channel (the second of three axes or more): of the two the axis along
    which the magnitudes differ most."""
    dims = min(x.dim() for x in values)
    axes = dict[str, int]()
    if dims > 2:
        axes["channel"] = 1
    if dims >= 2:
        axes["column"] = -1
    whole = max(_largest(x, ()) for x in values)
    result = InputMagnitudes(name, "", (whole[0],))
    for axis, dim in axes.items():
        sizes = {x.shape[dim] for x in values}
        if len(sizes) > 1:
            continue
        of_batches = zip(*(_largest(x, (dim,)) for x in values), strict=True)
        along_axis = InputMagnitudes(name, axis, tuple(map(max, of_batches)))
        result = max(result, along_axis, key=_unevenness)
    return result


def _largest(x: torch.Tensor, kept: tuple[int, ...]) -> list[float]:
    """Largest finite magnitude along all axes but `kept`, which is one axis or none."""
    finite = torch.where(x.isfinite(), x, 0.0).abs().double()
    if not kept:
        return [float(finite.max())]
    return finite.movedim(kept[0], 0).flatten(1).amax(1).tolist()


def _unevenness(one: InputMagnitudes) -> float:
    """How much magnitudes differ along an input's axis; 0 for an input without one.

    Formula: the larger of largest / median and median / smallest, over the columns or channels that are not all zero.
    """
    known = [value for value in one.largest if value]
    if not one.axis or not known:
        return 0.0
    middle = median(known)
    return max(max(known) / middle, middle / min(known))


def input_findings(
    inputs: Sequence[InputMagnitudes],
    capture: Capture,
    rules: Sequence[Rule],
    formats: Collection[str],
    verdicts: Mapping[str, Mapping[str, Verdict]],
) -> Iterator[Finding]:
    """A finding for each input with columns that overflow or underflow a format to which a strategy casts the input.

    The measurement confirms a finding if an operation that reads the input is sensitive or unsafe.
    """
    known = {rule.code: rule for rule in rules}
    for one in inputs:
        for code, is_beyond in ((OVERFLOWS, _overflows), (UNDERFLOWS, _underflows)):
            rule = known.get(code)
            for fmt in (fmt for fmt in rule.formats if fmt in formats) if rule else ():
                row = FORMATS[fmt]
                columns = [index for index, value in enumerate(one.largest) if is_beyond(value, row)]
                where = WHERE.get(cast_by(capture, one.name, fmt))
                if rule and columns and where:
                    yield _finding(rule, one, columns, fmt, where, capture, verdicts)


def _overflows(largest: float, row: Format) -> bool:
    return largest > row.largest


def _underflows(largest: float, row: Format) -> bool:
    return 0 < largest < row.smallest_normal


def cast_by(capture: Capture, name: str, fmt: str) -> tuple[str, ...]:
    """Strategies that cast an input of the model to the format before an operation reads it."""
    policies = {how: Policy(capture, how, plain(fmt), fmt) for how in ("autocast", "cast")}
    return tuple(how for how, policy in policies.items() if is_input_cast(policy, name))


def is_input_cast(policy: Policy, name: str) -> bool:
    """Whether an input of the model is cast to low precision before an operation reads it: at the model's entry, or by
    autocast at an operation."""
    for node in policy.capture.nodes.values():
        if name in node.inputs:
            casts = policy.casts(node)
            by_autocast = casts.autocast == "lower" and is_low(casts.precision)
            if by_autocast or any(map(is_low, policy.conversions_between(name, node.name))):
                return True
    return False


def _finding(
    rule: Rule,
    one: InputMagnitudes,
    columns: Sequence[int],
    fmt: str,
    where: str,
    capture: Capture,
    verdicts: Mapping[str, Mapping[str, Verdict]],
) -> Finding:
    readers = [node for node in capture.nodes.values() if one.name in node.inputs]
    first = readers[0]
    worst = max(columns, key=lambda index: one.largest[index])
    largest = one.largest[worst]

    limit = f"smallest normal number is {FORMATS[fmt].smallest_normal:.6g}"
    if rule.code == OVERFLOWS:
        limit = f"largest number is {FORMATS[fmt].largest:.6g}"
    size = f"{largest:.4g}"
    if one.axis:
        size += f" in {one.axis} {worst}"
    if len(one.largest) > 1:
        size += f" ({_named(one, columns)})"
    message = f"{rule.message}, whose {limit}: `{one.name}` reaches {size}, and is cast to {label(fmt)} {where}"

    of_readers = [verdicts.get(node.name, {}) for node in readers]
    measured = {by_format[fmt].verdict for by_format in of_readers if fmt in by_format} - {"untested"}
    agrees = None
    if measured:
        agrees = not measured.isdisjoint(FLAGGED)
    evidence = {"input": one.name, "axis": one.axis, "columns": tuple(columns), "largest": largest}
    place = {"node": one.name, "owner": first.owner, "op": INPUT_OP, "source": first.source}
    finding = finding_of(rule, **place, formats=(fmt,), message=message, evidence=evidence)
    severity = "info" if agrees is False else finding.severity
    return replace(finding, agrees=agrees, severity=severity)


def _named(one: InputMagnitudes, columns: Sequence[int]) -> str:
    """The columns in question, in words."""
    if len(columns) == len(one.largest):
        return f"all {len(columns)} {one.axis}s"
    names = [str(index) for index in columns[:NAMED]]
    left = len(columns) - len(names)
    shown = ", ".join(names) + (f" and {left} more" if left else "")
    return f"{one.axis}{'s' * (len(columns) > 1)} {shown} of {len(one.largest)}"
