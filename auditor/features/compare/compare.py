"""Compares two recordings: the verdict, the places where they part, and where one rounds more than the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ...errors import AuditorError
from .fingerprint import Fingerprint, distance, sketch_distance
from .gradients import GradientChange, compare_gradients
from .locate import Place, Side, differ, differing_inputs, locate, places_of
from .match import SLACK, STRICT, Closeness, Matches, match
from .recording import Output, Recording, Value
from .rounding import Rounding, find_roundings

Verdict = Literal["equal", "stored", "rounding", "gradients", "differ"]
"""equal: the same function. stored: the same function, but stored tensors were rounded differently. rounding: the same
function, which one run computes with larger rounding errors. gradients: the same outputs, with other derivatives.
differ: another function."""

SEVERITY: Mapping[str, str] = {
    "equal": "never",
    "stored": "info",
    "rounding": "warning",
    "gradients": "error",
    "differ": "error",
}
"""{verdict: its severity}, for the exit code."""


LOOSE = Closeness(SLACK)
"""Equal but for the rounding of stored tensors."""


@dataclass(frozen=True)
class OutputPair:
    """One output of both runs. apart: whether they differ in FP64. difference: relative L2 difference in FP64;
    of_runs: between the two runs; both are estimates from random projections. error_a, error_b: rounding errors."""

    a: Output
    b: Output
    apart: bool
    difference: float
    of_runs: float
    error_a: float
    error_b: float


@dataclass(frozen=True)
class Flip:
    """A decision of the runs that rounding changed: shares of entries that differ from FP64's decisions."""

    side: str
    value: Value
    share: float


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    places: where the functions part, the first one first. read: for a place whose operations read other values, these
    values of A and of B. stored: stored tensors of A and B that differ by rounding; None: they have no counterpart.
    roundings: where one run rounds more. caveats: what a reader must know of the two runs, in sentences.
    """

    a: Recording
    b: Recording
    verdict: Verdict
    outputs: tuple[OutputPair, ...]
    places: tuple[Place, ...] = ()
    read: tuple[tuple[Value, ...], tuple[Value, ...]] = ((), ())
    stored: tuple[tuple[Value | None, Value | None], ...] = ()
    roundings: tuple[Rounding, ...] = ()
    gradients: tuple[GradientChange, ...] = ()
    flips: tuple[Flip, ...] = ()
    matched: int = 0
    not_compared: tuple[str, ...] = field(default=())


def compare(a: Recording, b: Recording) -> Comparison:
    """Compare two recordings of runs on the same inputs.

    Raises: AuditorError(slug="other-inputs") if the inputs differ; AuditorError(slug="no-common-output").
    """
    not_compared = _check_inputs(a, b)
    pairs, lone = pair_outputs(a, b)
    not_compared += lone + _notes(a, b)
    names = [(x.value, y.value) for x, y in pairs]
    parting = _part(a, b, names)
    common = Comparison(
        a,
        b,
        "equal",
        tuple(_compare_output(a, b, x, y, parting.apart) for x, y in pairs),
        flips=tuple(_flips("A", a) + _flips("B", b)),
    )
    if parting.sides is not None:
        return _differing(common, parting.sides, not_compared)
    ours, theirs = match(a, b, LOOSE if parting.is_stored else STRICT)
    roundings = tuple(find_roundings(a, b, ours, theirs))
    changes, note = compare_gradients(a, b, ours, names, parting.is_stored, bool(lone))
    verdict: Verdict = "stored" if parting.is_stored else "equal"
    if changes:
        verdict = "gradients"
    elif roundings:
        verdict = "rounding"
    return replace(
        common,
        verdict=verdict,
        stored=tuple(_stored(a, b, ours, theirs)) if parting.is_stored else (),
        roundings=roundings,
        gradients=tuple(changes),
        matched=len(ours.equal),
        not_compared=tuple(not_compared + ([note] if note else [])),
    )


def _differing(common: Comparison, sides: tuple[Side, Side], not_compared: list[str]) -> Comparison:
    """The comparison of runs that compute different functions."""
    places = places_of(*sides)
    read: tuple[tuple[Value, ...], tuple[Value, ...]] = ((), ())
    if places and places[0].a is not None and places[0].b is not None:
        ours, theirs = differing_inputs(places[0], *sides)
        read = tuple(ours), tuple(theirs)
    return replace(
        common,
        verdict="differ",
        places=tuple(places),
        read=read,
        matched=len(sides[0].matches.equal),
        not_compared=(*not_compared, "rounding, since the functions differ"),
    )


@dataclass(frozen=True)
class _Parting:
    """Where the outputs part. apart: pairs of outputs that differ; sides: None if none differs. is_stored: whether the
    outputs are equal only if stored tensors may be rounded differently."""

    apart: tuple[tuple[str, str], ...] = ()
    sides: tuple[Side, Side] | None = None
    is_stored: bool = False


def _part(a: Recording, b: Recording, pairs: list[tuple[str, str]]) -> _Parting:
    """Compare the outputs, first as sets of numbers, then with their order; walk back from those that differ."""
    is_stored = False
    for ordered in (False, True):
        close = Closeness(ordered=ordered)
        apart = [pair for pair in pairs if differ(a, b, pair, close)]
        if not apart:
            continue
        sides = locate(a, b, apart, close)
        if _may_be_storage(*sides):
            loose = Closeness(SLACK, ordered)
            still_apart = [pair for pair in pairs if differ(a, b, pair, loose)]
            if not still_apart:
                is_stored = True
                continue
            looser = locate(a, b, still_apart, loose)
            if any(not side.is_table(name) for side in looser for name in side.first):
                sides, apart = looser, still_apart
        return _Parting(tuple(apart), sides)
    return _Parting(is_stored=is_stored)


def _may_be_storage(a: Side, b: Side) -> bool:
    """Whether rounding of stored tensors may explain that the outputs differ.

    It may if a stored tensor or a table has no counterpart, and no operation of A differs from one of B although both
    read the same values: rounding cannot explain that.
    """
    if not any(side.is_table(name) for side in (a, b) for name in side.first):
        return False
    for place in places_of(a, b):
        if place.a is None or place.b is None:
            continue
        if a.is_table(place.a.name) or b.is_table(place.b.name):
            continue
        inputs_a = [name for name in place.a.inputs if not a.recording.values[name].is_stored]
        inputs_b = {name for name in place.b.inputs if not b.recording.values[name].is_stored}
        if any({*a.matches.equal.get(name, [])} & inputs_b for name in inputs_a):
            return False
    return True


def _check_inputs(a: Recording, b: Recording) -> list[str]:
    """Sentences on inputs that only one run was given. Raises: AuditorError(slug="other-inputs")."""
    lone_a = [x for x in a.inputs if not any(_same_input(x, y) for y in b.inputs)]
    lone_b = [y for y in b.inputs if not any(_same_input(x, y) for x in a.inputs)]
    nothing_shared = len(lone_a) == len(a.inputs) and len(lone_b) == len(b.inputs)
    if (lone_a and lone_b) or (nothing_shared and (lone_a or lone_b)):
        shown = [f"{side} has {_input(value)}" for side, lone in (("A", lone_a), ("B", lone_b)) for value in lone[:1]]
        raise AuditorError(
            f"the runs are on different inputs: {' and '.join(shown)}. Record both on the same inputs: pass the same file "
            "to --inputs, or seed the inputs",
            slug="other-inputs",
        )
    sides = (("A", lone_a), ("B", lone_b))
    rounded = [x for x in a.inputs if x not in lone_a and not any(_same_input(x, y, STRICT) for y in b.inputs)]
    notes = [f"input {value.owner}: it differs by a rounding" for value in rounded]
    return notes + [f"input {value.owner}: only {side} was given it" for side, lone in sides for value in lone]


def _same_input(x: Value, y: Value, close: Closeness = LOOSE) -> bool:
    """Whether two inputs have the same entries up to a rounding, perhaps in another layout."""
    in_order = replace(close, ordered=x.prints[0].shape == y.prints[0].shape)
    return in_order.are_equal(x, y)


def _input(value: Value) -> str:
    shape = ", ".join(map(str, value.prints[0].shape))
    return f"{value.owner} ({value.dtype} [{shape}], mean {value.prints[0].first / max(value.prints[0].count, 1):.6g})"


def pair_outputs(a: Recording, b: Recording) -> tuple[list[tuple[Output, Output]], list[str]]:
    """Pairs of outputs, and sentences on outputs of only one run: by name if all names are common, else by equal values,
    then by name, then by position. Raises: AuditorError(slug="no-common-output")."""
    left_a, left_b = list(a.outputs), list(b.outputs)
    pairs = list[tuple[Output, Output]]()

    def take(fits: object) -> None:
        for one in list(left_a):
            other = next((y for y in left_b if fits(one, y)), None)  # type: ignore[operator]
            if other is not None:
                pairs.append((one, other))
                left_a.remove(one)
                left_b.remove(other)

    def same_name(x: Output, y: Output) -> bool:
        return x.name == y.name

    def same_value(x: Output, y: Output) -> bool:
        return not differ(a, b, (x.value, y.value), STRICT)

    if {x.name for x in left_a} != {y.name for y in left_b}:
        take(same_value)
    take(same_name)
    if len(left_a) == len(left_b) or not pairs:
        take(lambda x, y: True)
    if not pairs:
        raise AuditorError("one of the runs has no output, so there is nothing to compare", slug="no-common-output")
    order = {output.name: index for index, output in enumerate(a.outputs)}
    pairs.sort(key=lambda pair: order[pair[0].name])
    lone = [f"output {x.name}: only A has it" for x in left_a] + [f"output {y.name}: only B has it" for y in left_b]
    return pairs, lone


def _compare_output(a: Recording, b: Recording, x: Output, y: Output, apart: Iterable[tuple[str, str]]) -> OutputPair:
    value_a, value_b = a.values[x.value], b.values[y.value]
    prints = value_a.prints[0], value_b.prints[0]
    return OutputPair(
        x,
        y,
        (x.value, y.value) in apart,
        _difference(*prints, x.wide, y.wide),
        _difference(*prints, x.run, y.run),
        value_a.error,
        value_b.error,
    )


def _difference(x: Fingerprint, y: Fingerprint, of_x: tuple[float, ...], of_y: tuple[float, ...]) -> float:
    """Relative difference of two outputs: from sketches if they have the same shape, else of the sums."""
    if x.count != y.count:
        return math.inf
    if x.shape == y.shape and of_x and of_y:
        return sketch_distance(of_x, of_y)
    return distance(x, y)


def _notes(a: Recording, b: Recording) -> list[str]:
    """What the recordings cannot cover, each note with its side unless it is of both."""
    both = [note for note in a.not_compared if note in b.not_compared]
    only_a = [f"{note} (A)" for note in a.not_compared if note not in both]
    return both + only_a + [f"{note} (B)" for note in b.not_compared if note not in both]


def _flips(side: str, recording: Recording) -> list[Flip]:
    """Decisions that rounding changed, the largest share first."""
    found = [Flip(side, value, value.flips) for value in recording.values.values() if value.flips]
    return sorted(found, key=lambda flip: -flip.share)


def _stored(a: Recording, b: Recording, ours: Matches, theirs: Matches) -> Iterable[tuple[Value | None, Value | None]]:
    """Stored tensors that differ by rounding, or have no counterpart."""
    for value in a.values.values():
        if not (value.is_stored or value.kind == "input"):
            continue
        best = ours.best(value.name)
        other = b.values[best] if best else None
        if other is None or (other.kind == value.kind and not STRICT.are_equal(value, other)):
            yield value, other
    for value in b.values.values():
        if value.is_stored and theirs.best(value.name) is None:
            yield None, value
