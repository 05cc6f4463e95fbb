"""The result of a comparison: as text for a terminal, as an HTML page, and as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...report.blocks import Block, Grid, Item, Prose, environment
from ...report.words import count, op, ratio
from .compare import Comparison, OutputPair
from .fingerprint import Fingerprint
from .locate import Place
from .recording import Recording, Value
from .rounding import Rounding

SHOWN = 8
"""Maximum number of entries of a list on a terminal."""


CODE = "code"
"""Style of an Item whose first note is a line of code."""

STORED_DIFFER = "These stored tensors differ:"


def headline(found: Comparison) -> str:
    """The verdict in one sentence."""
    match found.verdict:
        case "equal":
            return "Equal: both runs compute the same function."
        case "stored":
            return "Equal but for stored roundings: stored tensors differ by about a rounding, and nothing else does."
        case "rounding":
            first = found.roundings[0]
            return f"Same function; {first.side} rounds more at {_named(first.at)}."
        case "gradients":
            return f"Same outputs, but other gradients: {count(len(found.gradients), 'parameter')} differ."
        case _:
            return f"The runs differ: first at {_first(found)}."


def overview(found: Comparison, files: tuple[str, str]) -> list[Block]:
    """Blocks of the result for a terminal: verdict, first place, outputs, rounding, gradients, decisions, and what was
    not compared."""
    style = {"equal": "good", "stored": "good", "rounding": "warning"}.get(found.verdict, "error")
    return [
        Prose("   ".join(_runs(found, files)), (), "title"),
        Prose("Verdict", (headline(found),), style),
        *_body(found),
    ]


def _runs(found: Comparison, files: tuple[str, str]) -> tuple[str, str]:
    """The two runs, each with its file and target."""
    return f"A: {files[0]} ({found.a.target})", f"B: {files[1]} ({found.b.target})"


def _body(found: Comparison) -> list[Block]:
    """All blocks below the verdict."""
    return [
        *_places(found),
        *_stored(found),
        *_roundings(found),
        *_gradients(found),
        *_outputs(found),
        *_flips(found),
        Prose("Runs", tuple(_environment(found.a, found.b))),
        Prose("Compared", (_coverage(found),)),
        Prose("Left out", tuple(f"Not compared: {note}." for note in found.not_compared), "muted"),
    ]


def render(found: Comparison, files: tuple[str, str]) -> str:
    """The comparison as one HTML document without external resources."""
    page = [Prose("", _runs(found, files), listed=True), *(_for_page(block) for block in _body(found) if block)]
    title = f"{found.b.target}: two runs compared"
    return environment().get_template("diff.html.jinja").render(title=title, headline=headline(found), page=page)


def _for_page(block: Block) -> Block:
    """A block as the page shows it: each sentence and each note on a line of its own, lines of code as code."""
    if isinstance(block, Item):
        head = block.head.strip()
        notes = block.notes
        if block.style == CODE and "`" not in notes[0]:
            notes = (f"`{notes[0]}`", *notes[1:])
        return Prose(head, notes, listed=True) if notes else Prose("", (head,))
    if isinstance(block, Prose) and len(block.texts) > 1:
        return replace(block, listed=True)
    return block


def _item(head: str, value: Value, more: tuple[str, ...] = ()) -> Item:
    """A value as an Item, with its line of code first."""
    return Item(head, (*_details(value), *more), CODE if value.code else "")


def _named(value: Value) -> str:
    """An operation with its source line and module, or a stored tensor with its name."""
    if value.kind != "operation":
        return f"{value.kind} {value.owner}"
    where = value.source or "no source line"
    return f"{op(value.op)} ({where})"


def _first(found: Comparison) -> str:
    if not found.places:
        return "the outputs"
    place = found.places[0]
    named = [_named(value) for value in (place.a, place.b) if value is not None]
    return named[0] if len({*named}) == 1 else f"{named[0]} in A, {named[1]} in B"


def _places(found: Comparison) -> list[Block]:
    """The places where the functions part, the first one in full."""
    if not found.places:
        return []
    first, *others = found.places
    result: list[Block] = [Prose("First", (_why(first, found),))]
    result += [_side("A", first.a, first, 0), _side("B", first.b, first, 1)]
    if first.how == "inputs":
        for side, values in zip("AB", found.read, strict=True):
            result += [_item(f"  {side} reads {_named(value)}", value) for value in values[:2]]
    if others:
        result.append(Prose("Also", (f"{count(len(others), 'further place')} that these do not explain:",)))
        for place in others:
            named = [f"{side} {_named(x)}" for side, x in (("A", place.a), ("B", place.b)) if x is not None]
            result.append(Item("  " + "; ".join(named)))
    return result


def _why(place: Place, found: Comparison) -> str:
    """Why the first place is one, in a sentence."""
    if place.how == "order":
        return "Here equal numbers get another order:"
    if place.a is None or place.b is None:
        side = "A" if place.b is None else "B"
        return f"Only {side} has this value; all that it is computed from is equal:"
    if place.a.is_stored and place.b.is_stored:
        random = "random" in found.a.environment.get("weights", "")
        return "These stored tensors differ; the weights are random, so pass --weights:" if random else STORED_DIFFER
    if place.how == "inputs" and any(found.read):
        return "The same operation reads other values:"
    if place.how == "inputs":
        return "The same operation on equal values; they may be combined in another order:"
    return "All inputs are equal, the results are not:"


def _side(side: str, value: Value | None, place: Place, index: int) -> Item:
    if value is None:
        return Item(f"  {side} has no such operation")
    literals = [f"{name} = {pair[index]}" for name, pair in place.differing_literals.items() if pair[index] is not None]
    differing = (f"differs: {', '.join(literals)}",) if literals else ()
    return _item(f"  {side} {_named(value)}", value, differing)


def _details(value: Value) -> tuple[str, ...]:
    """The source line of a value, its module, shape and dtype."""
    shape = ", ".join(map(str, value.prints[0].shape))
    about = f"{value.dtype} [{shape}]"
    if value.kind == "operation":
        about = f"in {value.owner or 'the model'}, {about}"
    if value.called_from:
        about += f", called from {value.called_from}"
    return (value.code, about) if value.code else (about,)


def _stored(found: Comparison) -> list[Block]:
    """Stored tensors that differ by rounding, or that the other run does not have."""
    lines = []
    for a, b in found.stored[:SHOWN]:
        if a is not None and b is not None:
            lines.append(f"{a.owner}: {_dtype(a)} in A; {b.owner}: {_dtype(b)} in B")
        elif a is not None:
            lines.append(f"{a.kind} {a.owner} of A has no counterpart")
        elif b is not None:
            lines.append(f"{b.kind} {b.owner} of B has no counterpart")
    if len(found.stored) > SHOWN:
        lines.append(f"and {len(found.stored) - SHOWN} more")
    return [Prose("Stored", tuple(lines))]


def _dtype(value: Value) -> str:
    """A stored tensor's dtype, and the lower one whose values it has."""
    return f"{value.dtype} with values of {value.fits}" if value.fits else value.dtype


def _roundings(found: Comparison) -> list[Block]:
    """Where one run rounds more than the other."""
    if not found.roundings:
        return []
    result: list[Block] = [Prose("Rounding", ("One run rounds more, in the order of execution:",))]
    for rounding in found.roundings[:SHOWN]:
        style = CODE if rounding.at.code else ""
        notes = (*_details(rounding.at)[:1], _how(rounding))
        result.append(Item(f"  {rounding.side} {_named(rounding.at)}", notes, style))
    return result


def _how(rounding: Rounding) -> str:
    """What the operation does, and how much error it adds."""
    does = f"casts to {rounding.at.dtype}" if rounding.is_cast else f"computes in {rounding.at.dtype}"
    other = "A" if rounding.side == "B" else "B"
    counterpart = f"; {other}: {rounding.other.dtype}, error {ratio(rounding.other_error)}" if rounding.other else ""
    more = f"; {rounding.count} times on this line" if rounding.count > 1 else ""
    return f"{does}, error {ratio(rounding.error)}{counterpart}{more}"


def _gradients(found: Comparison) -> list[Block]:
    if not found.gradients:
        return []
    first = found.gradients[0]
    result: list[Block] = []
    if first.at_a is not None and first.at_b is not None:
        result.append(Prose("First", ("Backwards from the outputs, the gradients part here:",)))
        result += [_item(f"  {side} {_named(x)}", x) for side, x in (("A", first.at_a), ("B", first.at_b))]
    result += _own_backwards(found)
    lines = [f"{change.a.owner}: {change.how}" for change in found.gradients[:SHOWN]]
    if len(found.gradients) > SHOWN:
        lines.append(f"and {len(found.gradients) - SHOWN} more")
    return [*result, Prose("Gradients", tuple(lines))]


def _own_backwards(found: Comparison) -> list[Block]:
    """The backwards written by hand through which gradients that differ may pass."""
    lines = list[str]()
    sides = (("A", found.a, [each.a for each in found.gradients]), ("B", found.b, [each.b for each in found.gradients]))
    for side, recording, parameters in sides:
        if not any(parameter.own_gradient for parameter in parameters):
            continue
        named = ", ".join(recording.own_backwards) or "code of the model's own, such as a hook"
        lines.append(f"Gradients of {side} are other ones than its operations have: see the backward of {named}.")
    return [Prose("Backward", tuple(lines))] if lines else []


def _outputs(found: Comparison) -> list[Block]:
    heads = ("Output", "A - B in FP64", "A - B in the runs", "rounding of A", "rounding of B")
    rows = [_row(pair) for pair in found.outputs]
    return [Grid(heads, tuple(rows), caption="Relative L2 differences; those of A and B are estimated to about 20 %.")]


def _row(pair: OutputPair) -> tuple[str, ...]:
    name = pair.a.name if pair.a.name == pair.b.name else f"{pair.a.name} / {pair.b.name}"
    numbers = pair.difference, pair.of_runs, pair.error_a, pair.error_b
    return (name, *map(ratio, numbers))


def _flips(found: Comparison) -> list[Block]:
    """Decisions that rounding changed; the errors above are those of the continuous part."""
    lines = [f"{flip.side} {_named(flip.value)}: {flip.share:.2%} of the entries" for flip in found.flips[:SHOWN]]
    note = ["Rounding changed these decisions; the errors above are with each run's own decisions."] if lines else []
    return [Prose("Decisions", (*note, *lines))]


def _environment(a: Recording, b: Recording) -> list[str]:
    """What differs between the environments of the runs, in sentences."""
    names = [*dict.fromkeys((*a.environment, *b.environment))]
    differing = [name for name in names if a.environment.get(name) != b.environment.get(name)]
    lines = [
        f"{name}: {a.environment.get(name, 'none')} in A, {b.environment.get(name, 'none')} in B" for name in differing
    ]
    return lines or [f"same environment: torch {a.environment['torch']}, {a.environment['device']}"]


def _coverage(found: Comparison) -> str:
    values = f"{found.matched:,} of A's {len(found.a.values):,} values occur in B, which has {len(found.b.values):,}"
    return f"{values}; {count(len(found.outputs), 'output')}"


def to_data(found: Comparison, files: tuple[str, str]) -> dict[str, Any]:
    """The comparison as data for JSON."""
    return {
        "verdict": found.verdict,
        "headline": headline(found),
        "a": {"file": files[0], "target": found.a.target, "environment": dict(found.a.environment)},
        "b": {"file": files[1], "target": found.b.target, "environment": dict(found.b.environment)},
        "outputs": [
            {
                "a": pair.a.name,
                "b": pair.b.name,
                "differs": pair.apart,
                "difference": pair.difference,
                "difference_of_runs": pair.of_runs,
                "error_a": pair.error_a,
                "error_b": pair.error_b,
            }
            for pair in found.outputs
        ],
        "places": [
            {"how": place.how, "a": _value(place.a), "b": _value(place.b), "literals": place.differing_literals}
            for place in found.places
        ],
        "read": [[_value(value) for value in side] for side in found.read],
        "stored": [[_value(a), _value(b)] for a, b in found.stored],
        "roundings": [
            {
                "side": one.side,
                "at": _value(one.at),
                "other": _value(one.other),
                "error": one.error,
                "other_error": one.other_error,
                "count": one.count,
            }
            for one in found.roundings
        ],
        "gradients": [
            {"parameter": one.a.owner, "how": one.how, "a": _value(one.at_a), "b": _value(one.at_b)}
            for one in found.gradients
        ],
        "decisions": [{"side": one.side, "at": _value(one.value), "flips": one.share} for one in found.flips],
        "own_backwards": {"a": list(found.a.own_backwards), "b": list(found.b.own_backwards)},
        "not_compared": list(found.not_compared),
    }


def _value(value: Value | None) -> Mapping[str, Any] | None:
    if value is None:
        return None
    print: Fingerprint = value.prints[0]
    about = {name: getattr(value, name) for name in ("name", "kind", "op", "owner", "source", "code", "called_from")}
    return about | {"dtype": value.dtype, "shape": list(print.shape), "literals": dict(value.literals)}
