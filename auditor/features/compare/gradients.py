"""Compares the gradients of two runs of the same function: the derivative of one projection of all outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .fingerprint import Fingerprint, distance
from .match import Closeness, Matches
from .recording import Recording, Value

EXACT = 1e-9
"""Relative difference up to which gradients in FP64 are equal: a backward pass magnifies rounding more than a forward."""

ZERO = 1e-9
"""A gradient whose entries are this many times smaller than those of the largest gradient is zero up to rounding."""


@dataclass(frozen=True)
class GradientChange:
    """A parameter whose gradient differs. a, b: the parameter in both recordings. how: in words. at_a, at_b:
    operations of A and B that hand back other derivatives of equal values; None: unknown."""

    a: Value
    b: Value
    how: str
    at_a: Value | None = None
    at_b: Value | None = None


def compare_gradients(
    a: Recording, b: Recording, ours: Matches, outputs: list[tuple[str, str]], is_stored: bool, has_lone: bool
) -> tuple[list[GradientChange], str | None]:
    """Parameters whose gradients differ, and why gradients were not compared, if they were not.

    Gradients are of a projection of all outputs by their order, so the outputs must be the same ones in one layout.
    """
    if not any(value.gradients for value in a.values.values()):
        return [], None
    if not any(value.gradients for value in b.values.values()):
        return [], None
    if is_stored:
        return [], "gradients, since stored tensors differ"
    in_order = Closeness(ordered=True)
    if has_lone or not all(in_order.are_equal(a.values[x], b.values[y]) for x, y in outputs):
        return [], "gradients, since the runs return other outputs, or in another layout"
    scale = _scale(a)
    of_own = max(a.own_tolerance, b.own_tolerance)
    changes = list[GradientChange]()
    for name, others in ours.equal.items():
        x = a.values[name]
        if x.kind != "parameter":
            continue
        partners = [b.values[other] for other in others if b.values[other].kind == "parameter"]
        if not partners:
            continue
        if x.trainable and not any(y.trainable for y in partners):
            changes.append(GradientChange(x, partners[0], "frozen in B, trained in A"))
        elif not x.trainable and all(y.trainable for y in partners):
            changes.append(GradientChange(x, partners[0], "frozen in A, trained in B"))
        elif not any(_equal(x, y, scale, of_own) for y in partners):
            changes.append(GradientChange(x, partners[0], _described(x, partners[0])))
    if not changes:
        return [], None
    at_a, at_b = _last_difference(a, b, ours, scale)
    if any(change.a.own_gradient or change.b.own_gradient for change in changes):
        at_a, at_b = None, None  # the place is in a backward, which has no recorded operations
    return [GradientChange(c.a, c.b, c.how, at_a, at_b) for c in changes], None


def _scale(recording: Recording) -> float:
    """The largest root mean square of a parameter's gradient."""
    parameters = (value for value in recording.values.values() if value.kind == "parameter" and value.gradients)
    return max((_mean_square(value.gradients[0]) for value in parameters), default=0.0)


def _mean_square(print: Fingerprint | None) -> float:
    return math.sqrt(print.second / max(print.count, 1)) if print is not None else 0.0


def _gradient(value: Value) -> Fingerprint | None:
    return value.gradients[0] if value.gradients else None


def _equal(x: Value, y: Value, scale: float, of_own: float = EXACT) -> bool:
    """Whether two values have the same gradient, up to rounding. of_own: tolerance for gradients of a model's own
    backward pass."""
    ours, theirs = _gradient(x), _gradient(y)
    if max(_mean_square(ours), _mean_square(theirs)) <= ZERO * scale:
        return True
    if ours is None or theirs is None:
        return False
    tolerance = of_own if x.own_gradient or y.own_gradient else EXACT
    return distance(ours, theirs) <= tolerance


def _described(x: Value, y: Value) -> str:
    """How the gradients of a parameter differ, in words."""
    ours, theirs = _mean_square(_gradient(x)), _mean_square(_gradient(y))
    if not ours or not theirs:
        return f"zero in {'B' if ours else 'A'}"
    return f"root mean square {ours:.3g} in A, {theirs:.3g} in B"


def _last_difference(a: Recording, b: Recording, ours: Matches, scale: float) -> tuple[Value | None, Value | None]:
    """Where gradients part, backwards from the outputs: the last equal value whose gradients differ although those of
    all its readers are equal. Returns an operation of A and one of B that read the value."""
    unequal = {
        name for name in ours.equal if not any(_equal(a.values[name], y, scale) for y in _partners(b, ours, name))
    }
    readers_a, readers_b = _readers(a), _readers(b)
    for name in reversed(a.values):
        readers = readers_a.get(name, [])
        if name not in unequal or not readers or any(reader.name in unequal for reader in readers):
            continue
        other = next((y for y in _partners(b, ours, name) if y.name in readers_b), None)
        if other is not None:
            return _pick(readers, readers_b[other.name]), _pick(readers_b[other.name], readers)
    return None, None


def _partners(b: Recording, ours: Matches, name: str) -> list[Value]:
    return [b.values[other] for other in ours.equal[name]]


def _readers(recording: Recording) -> dict[str, list[Value]]:
    """{value: the operations that read it}."""
    result = dict[str, list[Value]]()
    for value in recording.values.values():
        for source in value.inputs:
            result.setdefault(source, []).append(value)
    return result


def _pick(own: list[Value], others: list[Value]) -> Value:
    """The first operation that the other run does not have, or the first."""
    known = {value.packet for value in others}
    return next((value for value in own if value.packet not in known), own[0])
