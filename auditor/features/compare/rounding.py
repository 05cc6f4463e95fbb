"""Finds where one of two runs of the same function rounds more than the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...numerics.formats import FORMATS
from .match import Matches
from .recording import Recording, Value

LARGER = 16.0
"""An error counts as larger than another if it is more than this many times as large."""

UNIT = 2.0**-24
"""The rounding unit of FP32."""

FLOOR = 32 * UNIT
"""Errors below this are those of any computation in FP32."""

INHERITED = 0.25
"""An operation inherits its error if an input has at least this share of it."""

MOST = 8
"""Maximum number of places that are named."""


@dataclass(frozen=True)
class Rounding:
    """A place where one run rounds more. side: "A" or "B", which rounds more. at: the operation that adds the error.
    other: the equal value of the other run, if any. error: relative L2 error of `at` in its run; other_error: of
    `other`. count: number of places on the same source line, or with the same operation."""

    side: str
    at: Value
    other: Value | None
    error: float
    other_error: float
    count: int = 1

    @property
    def is_cast(self) -> bool:
        """Whether the operation is a cast."""
        return self.at.packet in ("to", "_to_copy", "type_as", "convert_element_type")


def significant_bits(dtype: str) -> int:
    """Significant bits of a floating-point dtype by name; 0 for other dtypes."""
    return next((row.mantissa + 1 for row in FORMATS.values() if row.storage == dtype), 0)


def find_roundings(a: Recording, b: Recording, ours: Matches, theirs: Matches) -> list[Rounding]:
    """Where one run rounds more, in the order of execution: by errors, and by dtypes of equal values."""
    places = [*_by_error(a, b, ours), *_by_dtype(a, b, ours, theirs)]
    order = {("A", name): index for index, name in enumerate(a.values)}
    order |= {("B", name): index for index, name in enumerate(b.values)}
    places.sort(key=lambda place: order[place.side, place.at.name])
    grouped = dict[tuple[str, str | None, str, str], Rounding]()
    for place in places:
        key = place.side, place.at.source or place.at.owner, place.at.op, place.at.dtype
        known = grouped.get(key)
        if known is None:
            grouped[key] = place
        elif known.at.name != place.at.name:
            grouped[key] = replace(known, count=known.count + 1)
    return list(grouped.values())[:MOST]


def _by_error(a: Recording, b: Recording, ours: Matches) -> Iterator[Rounding]:
    """Equal values of which one has a far larger error, traced back to the operation that adds the error."""
    back = {other: name for name, others in reversed(ours.equal.items()) for other in reversed(others)}
    forth = {name: others[0] for name, others in ours.equal.items()}
    for name, other in forth.items():
        x, y = a.values[name], b.values[other]
        if x.kind != "operation" or y.kind != "operation":
            continue
        large, small = max(x.error, y.error), min(x.error, y.error)
        if not large > LARGER * small + FLOOR:
            continue
        if y.error > x.error:
            at = _origin(b, y)
            known = back.get(at.name)
            yield _rounding("B", at, a.values[known] if known is not None else None)
        else:
            at = _origin(a, x)
            known = forth.get(at.name)
            yield _rounding("A", at, b.values[known] if known is not None else None)


def _rounding(side: str, at: Value, other: Value | None) -> Rounding:
    return Rounding(side, at, other, at.error, other.error if other is not None else 0.0)


def _origin(recording: Recording, value: Value) -> Value:
    """Follow the largest error upstream to the operation that adds it."""
    while True:
        sources = [recording.values[name] for name in value.inputs if name in recording.values]
        worst = max(sources, key=lambda source: source.error, default=None)
        if worst is None or not worst.error >= INHERITED * value.error:
            return value
        value = worst


def _by_dtype(a: Recording, b: Recording, ours: Matches, theirs: Matches) -> Iterator[Rounding]:
    """Values that one run has in FP32 and the other only in low precision: an FP32 island that one of them lacks."""
    seen = set[str]()
    for name, others in ours.equal.items():
        value = a.values[name]
        if value.kind != "operation" or name in seen:
            continue
        same_a = [a.values[one] for one in theirs.equal.get(others[0], [name])]
        same_b = [b.values[one] for one in others]
        seen |= {one.name for one in same_a}
        widest_a, widest_b = _widest(same_a), _widest(same_b)
        if widest_a is None or widest_b is None:
            continue
        bits_a, bits_b = significant_bits(widest_a.dtype), significant_bits(widest_b.dtype)
        if bits_a == bits_b or min(bits_a, bits_b) >= 24:
            continue
        if bits_a > bits_b:
            yield _rounding("B", _first(same_b), widest_a)
        else:
            yield _rounding("A", _first(same_a), widest_b)


def _widest(values: list[Value]) -> Value | None:
    """The computed value with the most significant bits; None if no value is floating-point."""
    computed = [value for value in values if value.kind == "operation" and significant_bits(value.dtype)]
    return max(computed, key=lambda value: significant_bits(value.dtype), default=None)


def _first(values: list[Value]) -> Value:
    return next(value for value in values if value.kind == "operation")
