"""Model inputs that do not fit a format: the columns in question, and the findings of the rules about inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from ..execution.policy import Policy, plain
from ..execution.resolve import is_low
from ..numerics.entries import is_plain
from ..numerics.formats import FORMATS, label
from ..records import Capture, Finding, Subject, Verdict
from .findings import FLAGGED, finding_of
from .rule import Rule

OVERFLOWS, UNDERFLOWS, LOSES = "INP001", "INP002", "INP003"
LOST = 0.05
"""Rounding of a column, as a share of its variation, above which the column has lost its digits."""
LEAST_ROWS = 8
"""Fewest entries of a column from which its variation is known."""
LEAST_VARIATION = 1e-6
"""Smallest variation relative to the column's size that is no rounding of FP32 itself."""
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

    largest: largest finite magnitude of each column or channel; 0 if all its values are zero. rounding: {16-bit format:
    rounding error of each column or channel, relative to its variation, see `_rounding`}.
    """

    name: str
    axis: str
    largest: tuple[float, ...]
    rounding: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


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
    result = _magnitudes(name, "", torch.cat([x.reshape(1, -1) for x in values], 1))
    for axis, dim in axes.items():
        sizes = {x.shape[dim] for x in values}
        if len(sizes) == 1:
            columns = torch.cat([x.movedim(dim, 0).flatten(1) for x in values], 1)
            result = max(result, _magnitudes(name, axis, columns), key=_unevenness)
    return result


def _magnitudes(name: str, axis: str, columns: torch.Tensor) -> InputMagnitudes:
    """The magnitudes of an input whose columns are the rows of this tensor: [columns, entries]."""
    finite = torch.where(columns.isfinite(), columns, 0.0).double()
    largest = tuple(finite.abs().amax(1).tolist())
    rounding = {fmt: _rounding(finite, row.dtype) for fmt, row in FORMATS.items() if row.bytes == 2 and row.dtype}
    return InputMagnitudes(name, axis, largest, rounding)


def _rounding(columns: torch.Tensor, dtype: torch.dtype) -> tuple[float, ...]:
    """What rounding to a dtype does to each column: |round(x) - x| / |x - mean(x)|, both 2-norms over the entries; 0 for
    a column that is constant, or that overflows. columns: [columns, entries], FP64."""
    if columns.shape[1] < LEAST_ROWS:
        return (0.0,) * len(columns)
    error = torch.linalg.vector_norm(columns.to(dtype).double() - columns, dim=1)
    variation = torch.linalg.vector_norm(columns - columns.mean(1, keepdim=True), dim=1)
    is_known = variation > LEAST_VARIATION * torch.linalg.vector_norm(columns, dim=1)
    share = torch.where(is_known & error.isfinite(), error / variation, 0.0)
    return tuple(share.tolist())


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
    """A finding for each input with columns that overflow or underflow a format to which a strategy casts the input, or
    lose their variation there.

    The measurement confirms a finding if an operation that reads the input is sensitive or unsafe. It cannot confirm
    that a variation is lost: an output that contains the column's large mean has a small error nevertheless.
    """
    known = {rule.code: rule for rule in rules}
    for one in inputs:
        for code, columns_of in ((OVERFLOWS, _overflowing), (UNDERFLOWS, _underflowing), (LOSES, _losing)):
            rule = known.get(code)
            for fmt in (fmt for fmt in rule.formats if fmt in formats) if rule else ():
                columns = columns_of(one, fmt)
                where = WHERE.get(cast_by(capture, one.name, fmt))
                if rule and columns and where:
                    yield _finding(rule, one, columns, fmt, where, capture, verdicts)


def _overflowing(one: InputMagnitudes, fmt: str) -> list[int]:
    return [index for index, value in enumerate(one.largest) if value > FORMATS[fmt].largest]


def _underflowing(one: InputMagnitudes, fmt: str) -> list[int]:
    return [index for index, value in enumerate(one.largest) if 0 < value < FORMATS[fmt].smallest_normal]


def _losing(one: InputMagnitudes, fmt: str) -> list[int]:
    small = _underflowing(one, fmt)  # which has a rule of its own
    return [index for index, share in enumerate(one.rounding.get(fmt, ())) if share > LOST and index not in small]


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
    of_columns = one.rounding[fmt] if rule.code == LOSES else one.largest
    worst = max(columns, key=lambda index: of_columns[index])
    place = ""
    if one.axis:
        place += f" in {one.axis} {worst}"
    if len(of_columns) > 1:
        place += f" ({_named(one, columns)})"
    cast = f"and is cast to {label(fmt)} {where}"
    message = f"{rule.message}{_measured(rule, one, worst, fmt, place)}, {cast}"

    of_readers = [verdicts.get(node.name, {}) for node in readers]
    measured = {by_format[fmt].verdict for by_format in of_readers if fmt in by_format} - {"untested"}
    agrees = None
    if measured and rule.measurable:
        agrees = not measured.isdisjoint(FLAGGED)
    evidence = {"input": one.name, "axis": one.axis, "columns": tuple(columns), "largest": one.largest[worst]}
    at = {"node": one.name, "owner": first.owner, "op": INPUT_OP, "source": first.source}
    finding = finding_of(rule, **at, formats=(fmt,), message=message, evidence=evidence)
    severity = "info" if agrees is False else finding.severity
    return replace(finding, agrees=agrees, severity=severity)


def _measured(rule: Rule, one: InputMagnitudes, worst: int, fmt: str, place: str) -> str:
    """What is wrong with the worst column, in words. place: the column, in words."""
    size = f"{one.largest[worst]:.4g}{place}"
    if rule.code == LOSES:
        share = f"{one.rounding[fmt][worst]:.0%} of its variation"
        return f": `{one.name}` reaches {size}, where rounding to {label(fmt)} is {share}"
    limit = f"smallest normal number is {FORMATS[fmt].smallest_normal:.6g}"
    if rule.code == OVERFLOWS:
        limit = f"largest number is {FORMATS[fmt].largest:.6g}"
    return f", whose {limit}: `{one.name}` reaches {size}"


def _named(one: InputMagnitudes, columns: Sequence[int]) -> str:
    """The columns in question, in words."""
    if len(columns) == len(one.largest):
        return f"all {len(columns)} {one.axis}s"
    names = [str(index) for index in columns[:NAMED]]
    left = len(columns) - len(names)
    shown = ", ".join(names) + (f" and {left} more" if left else "")
    return f"{one.axis}{'s' * (len(columns) > 1)} {shown} of {len(one.largest)}"
