"""Detects wrong unscaling of a loss that the step multiplies by a constant itself, without a GradScaler.

Two trial steps show what the step does with its gradients between `backward` and the update. What divides them by the same
number in both, or by one in proportion to the factor of the loss, is an unscaling, and has to divide them by this factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from .result import StepFinding
from .sketch import apart
from .trials import BACKWARD, SAME, Trial, Write

BY_HAND = 64
"""Factor on a loss from which the user scales the loss by hand."""
EXACT = 1e-4
"""Largest relative difference of two factors that count as equal."""
LEAST_LIMIT = 0.05
"""A limit of the gradients' norm, divided by the loss's factor, below which the user chose it for unscaled gradients."""
CUT = 4.0
"""Factor by which a limit has to shrink gradients to matter."""
NO_ADDITION = 1e-5
"""An addition to gradients, per weight or per entry, that is too small for what the user meant."""
ROUND = 1e-4
"""Largest relative difference of a number from one with two digits, such as a user writes: 0.01 or 5e-4."""
MOST_FACTORS = 6
"""Maximum number of factors of a loss whose products are tried."""


@dataclass(frozen=True)
class _Change:
    """A change of a gradient after `backward`.

    shrinks_by: norm before over norm after. is_division: whether it is a division by the same number in both trials, or
    by one in proportion to the loss's factor. is_limit: whether it limits gradients to less than is usual for unscaled
    ones.
    """

    write: Write
    shrinks_by: float
    is_division: bool
    is_limit: bool


def is_scaled_by_hand(factor: float, is_fp16: bool) -> bool:
    """Whether a factor of a loss is a loss scale, and not the weight of a loss: outside FP16, only a power of two is."""
    if not (BY_HAND <= factor < math.inf):
        return False
    return is_fp16 or math.frexp(factor)[0] == 0.5


def judge_by_hand(first: Trial, second: Trial, is_fp16: bool, step: int) -> StepFinding | None:
    """A finding if gradients of a loss that is scaled by hand are not divided by its factor, or are limited before.

    first, second: the trials of two steps. is_fp16: whether FP16 operations led to the loss.
    """
    if first.failure or second.failure or not second.updates or not second.factors:
        return None
    if second.is_changed_inside:  # the optimizer's own `step` may divide
        return None
    if not first.factors or len({*first.factors}) > 1 or len({*second.factors}) > 1:
        return None
    factors = second.factors[-1]
    factor = math.prod(factors)
    grown = factor / math.prod(first.factors[-1])
    if factor < BY_HAND:
        return None
    right = [*_divisors(factors, len(second.factors))]
    found = list[tuple[int, StepFinding]]()
    for name in second.gradients:
        writes = _since_backward(second.writes.get(name, []))
        if not writes or not all(0 < write.norm < math.inf for write in writes):
            continue
        changes = [*_changes(first, second, name, factor, grown)]
        finding = _judge(changes, factor, right, is_fp16, second.updates[0].line, step)
        if finding is not None:
            found.append((writes[0].number, finding))
    if found:
        return min(found, key=lambda one: one[0])[1]
    return _judge_copies(first, second, factor, grown, right, step)


def judge_terms(first: Trial, second: Trial, step: int) -> StepFinding | None:
    """A finding if gradients are divided by a number that multiplies only some of the terms of their losses.

    first, second: the trials of two steps.
    """
    if first.failure or second.failure:
        return None
    grown = _largest_factor(second) / _largest_factor(first)
    for name, writes in second.writes.items():
        earlier = first.writes.get(name, [])
        passes = list[Write]()  # since the last division
        for i, write in enumerate(writes):
            if write.operation == BACKWARD:
                passes.append(write)
                continue
            divided = _division(earlier, writes, i, grown) if passes else None
            if divided is None:
                continue
            bare = _pass_with_bare_term(second, name, passes, divided)
            if bare is not None:
                message = (
                    f"only a part of the loss is multiplied by {divided:g}, and the gradients of all of it are divided by "
                    "it: multiply the whole loss"
                )
                return StepFinding("loss-not-scaled", message, bare.line, step)
            passes = []
    return None


def _largest_factor(trial: Trial) -> float:
    return max((abs(math.prod(term.factors)) for terms in trial.terms for term in terms), default=1.0)


def _division(earlier: list[Write], writes: list[Write], i: int, grown: float) -> float | None:
    """The number by which write number `i` divides a gradient in both trials, or in proportion to the loss's factor; None
    if it is no division by a loss scale."""
    one = _shrinks_by(earlier, i)
    other = _shrinks_by(writes, i)
    if one is None or other is None or other < BY_HAND or not _is_same(one, other, grown):
        return None
    return other if _is_proportional(writes[i - 1], writes[i], other) else None


def _pass_with_bare_term(trial: Trial, name: str, passes: list[Write], divided: float) -> Write | None:
    """The first backward pass with a term whose gradient is not meant to be divided, if that of another term is."""
    is_scaled = False
    bare: Write | None = None
    for write in passes:
        for term in trial.terms[write.backward_pass]:
            if name not in term.names:
                continue
            size = abs(math.prod(term.factors))
            if any(_is_near(divided, one) for one in _divisors(term.factors, len(passes))):
                is_scaled = True
            elif bare is None and _is_meant_undivided([size], divided):
                bare = write
    return bare if is_scaled else None


def judge_additions(trial: Trial, added: Trial, step: int) -> StepFinding | None:
    """A finding if the user adds to gradients, such as a weight decay, before dividing them by the factor of the loss.

    added: the step with all losses times zero, where gradients consist of what the user adds.
    """
    if added.failure or not trial.factors:
        return None
    right = [*_divisors(trial.factors[-1], len(trial.factors))]
    found = list[Write]()
    divided = 1.0
    for name, (weight_norm, root_of_entries) in trial.weights.items():
        addition, divided_by = _addition_before_division(trial.writes.get(name, []), added.writes.get(name, []), right)
        if addition is None:
            continue
        sizes = [addition.norm / size for size in (weight_norm, root_of_entries) if size]
        if _is_meant_undivided(sizes, divided_by):
            divided = divided_by
            found.append(addition)
    if not found:
        return None
    first = min(found, key=lambda write: write.number)
    message = (
        f"`{first.operation}` adds to gradients that are still multiplied by {divided:g}, such as a weight decay, which is "
        "then divided by it too: add after the division"
    )
    return StepFinding("change-before-unscale", message, first.line, step)


def _addition_before_division(usual: list[Write], added: list[Write], right: list[float]) -> tuple[Write | None, float]:
    """The first addition to a gradient whose sum is then divided by one of the numbers in `right`, and that number."""
    ones = _since_backward(usual) or usual  # no backward pass reaches FP32 copies of the weights
    others = _since_backward(added) or added
    if len(ones) != len(others) or any(one.line != other.line for one, other in zip(ones, others, strict=True)):
        return None, 1.0
    addition: Write | None = None
    for i, write in enumerate(others):
        if addition is None and write.norm:
            addition = write
        divided = _shrinks_by(ones, i) if i else None
        if divided is not None and any(_is_near(divided, one) for one in right):
            return addition if addition is not write else None, divided
    return None, 1.0


def _is_meant_undivided(sizes: list[float], divided: float) -> bool:
    """Whether what the user adds is of a size meant for gradients that are divided already.

    sizes: of the addition, relative to the weights and per entry. A number with at most two digits is what the user wrote.
    """
    for size in sizes:
        is_written = _is_round(size)
        if is_written != _is_round(size / divided):
            return is_written
    return max(sizes, default=0.0) / divided < NO_ADDITION


def _is_round(x: float) -> bool:
    return math.isfinite(x) and abs(float(f"{x:.1e}") - x) <= ROUND * x


def _judge(
    changes: list[_Change], factor: float, right: list[float], is_fp16: bool, update_line: str, step: int
) -> StepFinding | None:
    """The finding on the changes of one gradient. right: the numbers by which to divide it."""
    divided = 1.0
    limit: Write | None = None
    division: Write | None = None
    for change in changes:
        if change.is_division:
            divided *= change.shrinks_by
            division = change.write
        elif change.is_limit:
            limit = limit or change.write
        if division is not None and any(_is_near(divided, one) for one in right):
            return None if limit is None else _limited(limit, factor, step)
    if division is not None and not _is_near(divided, 1.0):
        return _other_factor(factor, divided, division.line, step)
    return _not_divided(factor, update_line, step) if is_fp16 else None


def _not_divided(factor: float, line: str, step: int) -> StepFinding:
    message = (
        f"the loss is multiplied by {factor:g}, and its gradients are used without a division by it: divide them before, "
        "or use a GradScaler"
    )
    return StepFinding("update-with-scaled-gradients", message, line, step)


def _limited(limit: Write, factor: float, step: int) -> StepFinding:
    message = (
        f"`{limit.operation}` limits gradients that are still multiplied by {factor:g}, and only then they are divided by "
        "it: divide them before"
    )
    return StepFinding("change-before-unscale", message, limit.line, step)


def _divisors(factors: tuple[float, ...], passes: int) -> Iterator[float]:
    """The numbers by which gradients may be divided: a product of the loss's factors that is a loss scale, or that times the
    number of backward passes, unless the loss is divided by this number. The other factors belong to the loss."""
    known = factors[:MOST_FACTORS]
    is_mean = any(_is_near(passes, 1 / one) for one in known)
    for count in range(1, len(known) + 1):
        for chosen in combinations(known, count):
            product = math.prod(chosen)
            if product >= BY_HAND:
                yield product
                if not is_mean:
                    yield product * passes


def _changes(first: Trial, second: Trial, name: str, factor: float, grown: float) -> Iterator[_Change]:
    """The changes of a gradient after its last `backward`, whose norms are known. grown: the factor over that of the first
    trial."""
    ones = _since_backward(first.writes.get(name, []))
    others = _since_backward(second.writes.get(name, []))
    for i in range(1, len(others)):
        before, write = others[i - 1], others[i]
        shrinks_by = before.norm / write.norm
        earlier = _shrinks_by(ones, i)
        is_same = earlier is not None and _is_same(earlier, shrinks_by, grown)
        size = _norm_at(second, write) / factor
        is_limit = shrinks_by > CUT and size < LEAST_LIMIT
        is_division = is_same and abs(shrinks_by - 1) > SAME and _is_proportional(before, write, shrinks_by)
        yield _Change(write, shrinks_by, is_division, is_limit)


def _since_backward(writes: list[Write]) -> list[Write]:
    """The last write by `backward`, and those after it; [] without one."""
    starts = [i for i, write in enumerate(writes) if write.operation == BACKWARD]
    return writes[starts[-1] :] if starts else []


def _shrinks_by(writes: list[Write], i: int) -> float | None:
    """The norm before write number `i` over the norm after it; None if unknown."""
    if i >= len(writes) or not writes[i].norm:
        return None
    ratio = writes[i - 1].norm / writes[i].norm
    return ratio if 0 < ratio < math.inf else None


def _is_proportional(before: Write, after: Write, shrinks_by: float) -> bool:
    divided = [x / shrinks_by for x in before.sketch]
    return apart(divided, [*after.sketch]) <= SAME


def _norm_at(trial: Trial, write: Write) -> float:
    """The norm of all gradients after the line of a write."""
    every = (one for writes in trial.writes.values() for one in writes)
    return math.hypot(*(one.norm for one in every if (one.line, one.operation) == (write.line, write.operation)))


def _judge_copies(
    first: Trial, second: Trial, factor: float, grown: float, right: list[float], step: int
) -> StepFinding | None:
    """The finding on gradients of FP32 copies of the weights, which are made from those of the model."""
    in_first = _copied(first)
    in_second = _copied(second)
    if not in_first or not in_second:
        return None
    divided = second.copies_norm / math.hypot(*(write.norm for write in in_second))
    earlier = first.copies_norm / math.hypot(*(write.norm for write in in_first))
    if not _is_same(earlier, divided, grown) or any(_is_near(divided, one) for one in right):
        return None
    if _is_near(divided, 1.0):
        return _not_divided(factor, second.updates[0].line, step)
    return _other_factor(factor, divided, in_second[-1].line, step)


def _copied(trial: Trial) -> list[Write]:
    """The gradients at the update of parameters that no backward pass reaches."""
    if not trial.copies_norm:
        return []
    last = [writes[-1] for writes in trial.writes.values() if writes and writes[0].operation != BACKWARD]
    return [write for write in last if 0 < write.norm < math.inf]


def _other_factor(factor: float, divided: float, line: str, step: int) -> StepFinding:
    message = (
        f"the loss is multiplied by {factor:g}, and its gradients are divided by {divided:.6g}: divide them by the same "
        "number, or use a GradScaler"
    )
    return StepFinding("divided-by-another-factor", message, line, step)


def _is_same(earlier: float, later: float, grown: float) -> bool:
    """Whether gradients are divided by the same number in both trials, or by one in proportion to the loss's factor."""
    return _is_near(earlier, later) or _is_near(earlier * grown, later)


def _is_near(x: float, y: float) -> bool:
    return abs(x - y) <= EXACT * abs(y)
