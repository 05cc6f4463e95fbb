"""Matches the values of two recordings by their fingerprints: names, shapes and layouts may differ."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .fingerprint import Fingerprint, distance, parts_of_sum, total
from .recording import Recording, Value

EXACT = 2e-12
"""Relative difference up to which two sums in FP64 are equal: other orders of summation differ by less."""

WIDENED = 64 * 2.0**-29
"""A change of stored tensors by a rounding of FP32 moves a fingerprint by its slack; one of FP64 by 2**-29 times that.
Deep models magnify the rounding of many operations, hence the factor."""

SLACK = 8.0
"""A fingerprint may differ by this many times its slack if stored tensors were rounded differently."""

MOST_SIBLINGS = 12
"""Parameters of this many layers of one module at most are combined in all ways to find what was fused."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Closeness:
    """How close fingerprints must be. slack: how many times a value's slack they may differ by, for stored tensors that
    were rounded differently. ordered: the order of the entries counts too."""

    slack: float = 0.0
    ordered: bool = False

    def tolerance(self, one: Value, other: Value) -> float:
        """The largest relative difference of equal values."""
        slack = max(one.slack, other.slack)
        if self.ordered:
            slack = max(slack, one.order_slack, other.order_slack)
        return max(EXACT, WIDENED * slack, self.slack * slack)

    def are_equal(self, one: Value, other: Value) -> bool:
        """Whether two values are equal in all their tensors that both have."""
        tolerance = self.tolerance(one, other)
        pairs = zip(one.prints, other.prints, strict=False)
        return all(distance(x, y, self.ordered) <= tolerance for x, y in pairs)


STRICT = Closeness()


@dataclass(frozen=True)
class _Entry:
    """A fingerprint of a value, for lookup. position: of the value in its recording. inner: inside an operation."""

    second: float
    print: Fingerprint
    value: Value
    position: int
    inner: bool = False


@dataclass
class Matches:
    """For the values of one recording: the equal values of the other, best first; and values that occur inside an
    operation of the other recording, or in a sum of its parameters."""

    equal: dict[str, list[str]] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.equal or name in self.inside

    def best(self, name: str) -> str | None:
        """The best equal value in the other recording, or the operation that has the value inside."""
        return self.equal[name][0] if name in self.equal else self.inside.get(name)

    def without(self, names: Iterable[str]) -> Matches:
        """The matches, with some values unmatched."""
        left = {*names}
        return Matches(
            {name: others for name, others in self.equal.items() if name not in left},
            {name: other for name, other in self.inside.items() if name not in left},
        )


def match(a: Recording, b: Recording, close: Closeness = STRICT) -> tuple[Matches, Matches]:
    """Match the values of two recordings; returns the matches of A's values and of B's."""
    ours, theirs = _match_one_way(a, b, close), _match_one_way(b, a, close)
    if not close.ordered:
        _match_fused(a, b, ours, theirs)
        _match_fused(b, a, theirs, ours)
    return ours, theirs


def forms_of(value: Value) -> Iterator[Fingerprint]:
    """The fingerprints by which a value is recognized: of its first tensor, and of the entries that count in it.

    Padding differs between equal implementations, and has no derivative. Further tensors of an operation, such as
    statistics, have nodes of their own if anything reads them.
    """
    first = value.prints[0]
    yield first
    if value.live and value.live[0] is not None and 0 < value.live[0].count < first.count:
        yield value.live[0]


def _match_one_way(a: Recording, b: Recording, close: Closeness) -> Matches:
    index = _index(b)
    scale = len(b.values) / max(len(a.values), 1)
    result = Matches()
    for position, value in enumerate(a.values.values()):
        whole = list[tuple[tuple[bool, bool, float], str]]()
        inside = list[tuple[float, str]]()
        for own in forms_of(value):
            for entry in _candidates(index, own, value, close):
                if distance(own, entry.print, close.ordered) > close.tolerance(value, entry.value):
                    continue
                apart = abs(entry.position - position * scale)
                if entry.inner:
                    inside.append((apart, entry.value.name))
                else:
                    rank = entry.value.op != value.op, entry.value.owner != value.owner, apart
                    whole.append((rank, entry.value.name))
        if whole:
            result.equal[value.name] = list(dict.fromkeys(name for _, name in sorted(whole)))
        elif inside:
            result.inside[value.name] = min(inside)[1]
    return result


def _index(recording: Recording) -> Mapping[tuple[int, int], list[_Entry]]:
    """{(entries, masked entries): fingerprints, by their sum of squares}."""
    index: dict[tuple[int, int], list[_Entry]] = defaultdict(list)
    for position, value in enumerate(recording.values.values()):
        for own in forms_of(value):
            index[own.count, own.masked].append(_Entry(own.second, own, value, position))
        for own in value.inner:
            index[own.count, own.masked].append(_Entry(own.second, own, value, position, inner=True))
    for entries in index.values():
        entries.sort(key=lambda entry: entry.second)
    return index


def _candidates(
    index: Mapping[tuple[int, int], list[_Entry]], own: Fingerprint, value: Value, close: Closeness
) -> Iterator[_Entry]:
    """Fingerprints with as many entries and about the same sum of squares."""
    entries = index.get((own.count, own.masked), [])
    widest = max((entry.value.slack for entry in entries), default=0.0)
    factor = max(WIDENED, close.slack)
    tolerance = min(2 * max(EXACT, factor * max(widest, value.slack)), 0.5)
    start = bisect_left(entries, own.second * (1 - tolerance), key=lambda entry: entry.second)
    for entry in itertools.islice(entries, start, None):
        if entry.second > own.second * (1 + tolerance):
            return
        yield entry


def _match_fused(a: Recording, b: Recording, ours: Matches, theirs: Matches) -> None:
    """Match parameters of A that hold several parameters of B: fused projections, stacked experts.

    The sums over all entries of the parts must be those of A's parameter.
    """
    parts = [value for value in b.values.values() if value.kind == "parameter"]
    rows = defaultdict[tuple[int, ...], list[Value]](list)
    for part in parts:
        rows[part.prints[0].shape[1:]].append(part)
    sums = [(total(part.prints[0] for part in group), group) for group in _groups(parts)]
    for value in a.values.values():
        if value.kind != "parameter" or value.name in ours:
            continue
        for part in _parts_of(value.prints[0], rows.values(), sums):
            ours.inside[value.name] = part.name
            if part.name not in theirs:
                theirs.inside[part.name] = value.name


def _parts_of(
    own: Fingerprint, rows: Iterable[list[Value]], sums: list[tuple[Fingerprint, list[Value]]]
) -> list[Value]:
    """The parameters that a parameter with the fingerprint `own` consists of; [] if there are none."""
    for group in rows:
        smaller = [part for part in group if part.prints[0].count < own.count]
        for found in parts_of_sum(own, [part.prints[0] for part in smaller], EXACT):
            return [smaller[index] for index in found]
    return next((group for whole, group in sums if distance(own, whole) <= EXACT), [])


def _groups(parts: list[Value]) -> list[list[Value]]:
    """Groups of parameters that an implementation may store as one: those of a few layers of one module, those whose
    names differ in one number, such as the experts of a layer, and pairs of such groups."""
    siblings: dict[str, list[Value]] = defaultdict(list)
    patterns: dict[str, list[Value]] = defaultdict(list)
    for part in parts:
        *parents, _, kind = ("", *part.owner.split("."))
        siblings[".".join((*parents, kind))].append(part)
        for number in _NUMBER.finditer(part.owner):
            patterns[f"{part.owner[: number.start()]}*{part.owner[number.end() :]}"].append(part)
    groups = list[list[Value]]()
    for group in siblings.values():
        if len(group) <= MOST_SIBLINGS:
            groups += [[*some] for size in (2, 3, 4) for some in itertools.combinations(group, size)]
    numbered = [group for group in patterns.values() if len(group) > 1]
    by_size: dict[tuple[int, int], list[list[Value]]] = defaultdict(list)
    for group in numbered:
        by_size[len(group), group[0].prints[0].count].append(group)
    pairs = (pair for same in by_size.values() if len(same) < 200 for pair in itertools.combinations(same, 2))
    return [*groups, *numbered, *(x + y for x, y in pairs)]
