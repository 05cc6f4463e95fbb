"""Finds where two runs part: from outputs that differ back to the first operations that differ on equal inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...numerics.operations import operation
from .fingerprint import distance
from .match import Closeness, Matches, match
from .recording import Recording, Value

MOST = 6
"""Maximum number of places that a comparison names."""


@dataclass(frozen=True)
class Side:
    """One recording and its matches in the other. region: unmatched values behind the outputs that differ. first: those
    of the region whose inputs all match, in the order in which they take effect."""

    recording: Recording
    matches: Matches
    region: frozenset[str] = frozenset()
    first: tuple[str, ...] = ()

    @cached_property
    def readers(self) -> Mapping[str, list[str]]:
        """{value: the operations that read it}."""
        result: dict[str, list[str]] = defaultdict(list)
        for value in self.recording.values.values():
            for source in value.inputs:
                result[source].append(value.name)
        return result

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """{value: its place in the order of execution}; a stored tensor is at its first reader."""
        order = {name: index for index, name in enumerate(self.recording.values)}
        result = dict[str, int]()
        for name, value in self.recording.values.items():
            readers = [name] if value.kind == "operation" else self.readers.get(name, [name])
            result[name] = min(order[reader] for reader in readers)
        return result

    @cached_property
    def active(self) -> Collection[str]:
        """Values that depend on a parameter or on numbers of the inputs: not tables, masks and positions."""
        result = set[str]()
        for value in self.recording.values.values():
            is_number = value.kind == "input" and value.is_float
            is_computed = not operation(value.op).asks_shape and not result.isdisjoint(value.inputs)
            if value.kind in ("parameter", "decision") or is_number or is_computed:
                result.add(value.name)
        return result

    def is_table(self, name: str) -> bool:
        """Whether a value is given or stored, or computed from nothing but shapes, whole numbers and buffers."""
        value = self.recording.values[name]
        return value.is_stored or value.kind == "input" or name not in self.active


@dataclass(frozen=True)
class Place:
    """One place where the runs part: a value of A, a value of B, or both. how: "operation", "order" or "inputs"."""

    a: Value | None
    b: Value | None
    how: str = "operation"

    @property
    def differing_literals(self) -> dict[str, tuple[str | None, str | None]]:
        """{argument: (A's value, B's)} of arguments that are not tensors and differ; of two different operations, only
        numbers with a point."""
        ours = self.a.literals if self.a is not None else {}
        theirs = self.b.literals if self.b is not None else {}
        if self.a is None or self.b is None or self.a.packet != self.b.packet:
            ours = {key: value for key, value in ours.items() if _is_fraction(value)}
            theirs = {key: value for key, value in theirs.items() if _is_fraction(value)}
        return {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)}


def _is_fraction(text: str) -> bool:
    """Whether a text is a number with a point or an exponent."""
    try:
        return not float(text).is_integer() or not text.lstrip("-").isdigit()
    except (ValueError, OverflowError):
        return False


def locate(a: Recording, b: Recording, outputs: Iterable[tuple[str, str]], close: Closeness) -> tuple[Side, Side]:
    """Walk back from pairs of outputs that differ, on both sides, to the first values that differ."""
    ends_a, ends_b = zip(*outputs, strict=True)
    ours, theirs = match(a, b, close)
    return (
        _walk_back(Side(a, ours.without(ends_a)), ends_a),
        _walk_back(Side(b, theirs.without(ends_b)), ends_b),
    )


def _walk_back(side: Side, ends: Collection[str]) -> Side:
    """The side with its region and its first values."""
    region, first = _frontier(side, side.matches, ends)
    other_forms = _other_forms(side) - {*ends}
    if other_forms:
        matches = Matches(side.matches.equal, {**side.matches.inside, **dict.fromkeys(other_forms, "")})
        smaller, fewer = _frontier(side, matches, ends)
        if fewer:
            region, first = smaller, fewer
    in_order = sorted(first, key=lambda name: (_is_helper(side, name), side.positions[name]))
    return Side(side.recording, side.matches, frozenset(region), tuple(in_order))


def _is_helper(side: Side, name: str) -> bool:
    """Whether a value is named only after others: a table that is no parameter, since other implementations build masks
    and positions differently; or a decision, which follows from values that differ."""
    value = side.recording.values[name]
    if value.kind == "parameter":
        return False
    return side.is_table(name) or not value.is_float


def _frontier(side: Side, matches: Matches, ends: Iterable[str]) -> tuple[set[str], list[str]]:
    """Unmatched values that lead to `ends` through unmatched values, and those of them whose inputs all match."""
    values = side.recording.values
    region = set[str]()
    waiting = [name for name in ends if name not in matches]
    while waiting:
        name = waiting.pop()
        if name in region:
            continue
        region.add(name)
        waiting += [source for source in values[name].inputs if source in values and source not in matches]
    first = [name for name in values if name in region and region.isdisjoint(values[name].inputs)]
    return region, first


def _other_forms(side: Side) -> set[str]:
    """Unmatched values that reach a matched value: another form of something equal, such as another mask.

    The matched value must be of numbers that depend on the model: indices and constants are equal by chance. Values
    equal to such a value are included.
    """
    result = set[str]()
    for name in reversed(side.recording.values):
        readers = side.readers.get(name, [])
        if name not in side.matches and any(one in result or _is_telling(side, one) for one in readers):
            result.add(name)
    prints = {side.recording.values[name].prints for name in result}
    same = {name for name, value in side.recording.values.items() if value.prints in prints}
    return result | {name for name in same if name not in side.matches}


def _is_telling(side: Side, name: str) -> bool:
    """Whether a value is matched, and its entries depend on those of its inputs and of the model."""
    value = side.recording.values[name]
    if name not in side.matches or name not in side.active:
        return False
    return value.is_float and not operation(value.op).asks_shape


def places_of(a: Side, b: Side) -> list[Place]:
    """The places where the runs part, the first one first: first values of A and B that read equal values are paired."""
    reordered = _reordered(a, b)
    left = list(b.first)
    places = list[Place]()
    for name in a.first:
        partner = max(left, key=lambda other: _affinity(a, b, name, other), default=None)
        if partner is not None and _affinity(a, b, name, partner)[0] > 0:
            left.remove(partner)
            places.append(_place(a, b, name, partner))
        else:
            places.append(Place(a.recording.values[name], None))
    places += [Place(None, b.recording.values[name]) for name in left]
    places = reordered + sorted(places, key=lambda place: _rank(place, a, b))
    if places and (places[0].a is None or places[0].b is None):
        first, *rest = _complete(places)
        places = [_with_namesake(first, a, b), *rest]
    return places[:MOST]


def _rank(place: Place, a: Side, b: Side) -> tuple[bool, bool, float]:
    """Sorts pairs before places of one side, helpers last, and otherwise by the share of the run before the place."""
    helpers = list[bool]()
    shares = list[float]()
    for side, value in ((a, place.a), (b, place.b)):
        if value is not None:
            helpers.append(_is_helper(side, value.name))
            shares.append(side.positions[value.name] / len(side.recording.values))
    is_lone = len(shares) < 2
    return all(helpers), is_lone, min(shares)


def _complete(places: list[Place]) -> list[Place]:
    """Join the first place of only one side with the first place of only the other."""
    lone_a = next((place for place in places if place.b is None), None)
    lone_b = next((place for place in places if place.a is None), None)
    if lone_a is None or lone_b is None or places[0] not in (lone_a, lone_b):
        return places
    rest = [place for place in places if place is not lone_a and place is not lone_b]
    return [Place(lone_a.a, lone_b.b), *rest]


def _with_namesake(place: Place, a: Side, b: Side) -> Place:
    """The place, with both tensors of a name if only one run's takes effect: zeros that are added change nothing."""
    sides = ((place.a, place.b, b), (place.b, place.a, a))
    for index, (own, partner, other_side) in enumerate(sides):
        if own is None or not own.is_stored or (partner is not None and partner.is_stored):
            continue
        namesake = next((each for each in other_side.recording.values.values() if _are_namesakes(own, each)), None)
        if namesake is not None:
            return Place(own, namesake) if index == 0 else Place(namesake, own)
    return place


def _are_namesakes(x: Value, y: Value) -> bool:
    """Whether two values are stored under the same name, in the same shape."""
    return x.kind == y.kind and x.owner == y.owner and x.prints[0].shape == y.prints[0].shape


def _affinity(a: Side, b: Side, ours: str, theirs: str) -> tuple[float, bool, float]:
    """How well two first values fit: inputs that they share, whether the operation is the same, and how near they are.

    An input of one that occurs inside the other counts like a shared one: a recurrent layer, and its cell written out.
    """
    if _is_helper(a, ours) != _is_helper(b, theirs):
        return 0.0, False, 0.0
    x = a.recording.values[ours]
    y = b.recording.values[theirs]
    is_same_op = x.op == y.op
    if x.is_stored or y.is_stored:
        return _affinity_of_stored(x, y), is_same_op, 0.0
    shared = sum(_is_read(a, source, y) for source in x.inputs)
    shared += sum(b.matches.inside.get(source) == ours for source in y.inputs)
    shared += sum(a.matches.inside.get(source) == theirs for source in x.inputs)
    bonus = 0.5 if is_same_op and x.owner == y.owner else 0.0
    share_before_x = a.positions[ours] / len(a.recording.values)
    share_before_y = b.positions[theirs] / len(b.recording.values)
    return shared + bonus, is_same_op, -abs(share_before_x - share_before_y)


def _affinity_of_stored(x: Value, y: Value) -> float:
    """How well two values fit of which at least one is a weight or buffer: by name, then by number of entries."""
    if not (x.is_stored and y.is_stored):
        return 0.0
    same_name = 1.0 if x.owner == y.owner else 0.0
    same_size = 0.5 if x.prints[0].count == y.prints[0].count else 0.0
    return same_name + same_size


def _is_read(side: Side, name: str, reader: Value) -> bool:
    """Whether an operation of the other side reads a value that equals the value `name` of this side."""
    return not set(side.matches.equal.get(name, ())).isdisjoint(reader.inputs)


def _place(a: Side, b: Side, ours: str, theirs: str) -> Place:
    """A pair of first values. If operation and arguments are the same, the inputs are not: another value is read."""
    x, y = a.recording.values[ours], b.recording.values[theirs]
    same = x.packet == y.packet and x.literals == y.literals and not x.is_stored
    return Place(x, y, "inputs" if same else "operation")


def differing_inputs(place: Place, a: Side, b: Side) -> tuple[list[Value], list[Value]]:
    """The inputs of a place's two operations that the other one does not read."""
    assert place.a is not None and place.b is not None
    ours = [a.recording.values[name] for name in place.a.inputs if not _is_read(a, name, place.b)]
    theirs = [b.recording.values[name] for name in place.b.inputs if not _is_read(b, name, place.a)]
    return ours, theirs


def _reordered(a: Side, b: Side) -> list[Place]:
    """Inputs of the differing region that are equal as sets of numbers, but in another order: where the order changed."""
    if not a.first or not b.first:
        return []
    edge_a, edge_b = _edge(a), _edge(b)
    places = list[Place]()
    ordered: tuple[Matches, Matches] | None = None
    for name in edge_a:
        if name in a.active and not a.recording.values[name].is_float:
            continue  # decisions, equal as sets by chance
        own = a.recording.values[name].prints[0]
        partners = [other for other in a.matches.equal.get(name, []) if other in edge_b]
        alike = [o for o in partners if b.recording.values[o].prints[0].shape == own.shape and own.count > 1]
        in_order = Closeness(ordered=True)
        if not alike or any(in_order.are_equal(a.recording.values[name], b.recording.values[o]) for o in alike):
            continue
        ordered = ordered or _in_order(a, b, in_order)
        _, first_a = _frontier(a, ordered[0], [name])
        _, first_b = _frontier(b, ordered[1], alike[:1])
        x = a.recording.values[(first_a or [name])[0]]
        y = b.recording.values[(first_b or alike)[0]]
        if not (x.is_stored or y.is_stored):
            places.append(Place(x, y, "order"))
    return _unique(places)


def _in_order(a: Side, b: Side, close: Closeness) -> tuple[Matches, Matches]:
    """Matches by order too; of stored tensors without, since products are fused and transposed."""
    result = match(a.recording, b.recording, close)
    for side, matches in zip((a, b), result, strict=True):
        stored = (name for name, value in side.recording.values.items() if value.is_stored and name in side.matches)
        matches.inside.update(dict.fromkeys(stored, ""))
    return result


def _unique(places: list[Place]) -> list[Place]:
    names = {(place.a.name if place.a else "", place.b.name if place.b else ""): place for place in reversed(places)}
    return list(reversed(names.values()))


def _edge(side: Side) -> list[str]:
    """Matched inputs of the first values, in the order of execution."""
    values = side.recording.values
    sources = {source for name in side.first for source in values[name].inputs if source in values}
    return [name for name in values if name in sources and name not in side.region]


def differ(a: Recording, b: Recording, pair: tuple[str, str], close: Closeness) -> bool:
    """Whether two outputs differ; their order counts if their shapes are equal and `close` asks for it."""
    ours, theirs = pair
    x = a.values[ours]
    y = b.values[theirs]
    have_equal_shapes = x.prints[0].shape == y.prints[0].shape
    difference = distance(x.prints[0], y.prints[0], close.ordered and have_equal_shapes)
    return difference > close.tolerance(x, y)
