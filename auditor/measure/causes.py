"""What went wrong in one node in one format, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..numerics.formats import Format
from ..numerics.histogram import Profile
from ..numerics.metrics import Damage
from ..numerics.operations import operation
from ..records import Contribution, NodeError


@dataclass(frozen=True)
class Quotient:
    """What a node has to do with a division, a logarithm or an inverse root, where the smallest entries count most.

    divisor: what it divides by, or takes one of, if it does; divides: whether an operation does that with its result.
    """

    divisor: Profile | None = None
    divides: bool = False


def cause_of(
    op: str,
    hurt: Damage,
    error: float,
    fmt: Format,
    result: Profile,
    inputs: Sequence[Profile],
    quotient: Quotient = Quotient(),
) -> str | None:
    """overflow | nan | underflow | cancellation | rounding | None for an exact result.

    underflow: what is so small that the format rounds it to zero, or keeps fewer bits of it than of others. Infinities and
    NaN that come of a divisor which the format rounds to zero are such, where the result itself would fit.
    cancellation: an addition or subtraction whose result is so much smaller than its operands that their rounding
    weighs at least eight times what it would in the result. Source: Higham, section 1.7.
    """
    smallest = quotient.divisor.range.min_abs if quotient.divisor is not None else 0.0
    if (
        (hurt.overflow or hurt.nan)
        and 0 < smallest <= fmt.smallest_subnormal / 2
        and result.range.max_abs <= fmt.largest
    ):
        return "underflow"
    if hurt.overflow:
        return "overflow"
    if hurt.nan:
        return "nan"
    if error == 0:
        return None
    if quotient.divides and (hurt.underflow or hurt.subnormal >= 0.01):
        return "underflow"
    if 0 < smallest < fmt.smallest_normal and error > fmt.epsilon:
        return "underflow"
    if hurt.underflow >= 0.01 and error > fmt.epsilon and result.range.min_abs < fmt.smallest_normal:
        return "underflow"
    if operation(op).cancels and error > 8 * fmt.epsilon / 2 and _shrinks(result, inputs):
        return "cancellation"
    return "rounding"


def explained(
    errors: Mapping[str, Mapping[str, NodeError]], contributions: Mapping[str, Mapping[str, Contribution]]
) -> dict[str, dict[str, NodeError]]:
    """The errors with their causes, once it is known what they do to the outputs: rounding turns no output non-finite where
    nothing overflows, a number that vanishes does, where something divides by it later."""
    return {
        name: {fmt: _explained(error, contributions[name].get(fmt)) for fmt, error in formats.items()}
        for name, formats in errors.items()
    }


def _explained(error: NodeError, contribution: Contribution | None) -> NodeError:
    whole = contribution is None or math.isfinite(contribution.isolated) or error.overflow or error.nan
    return error if whole or error.cause != "rounding" or not error.underflow else replace(error, cause="underflow")


def breaks(error: NodeError, contribution: Contribution | None) -> bool:
    """Whether an operation refuses a format, or makes something non-finite of what is finite in FP32."""
    broken = error.unsupported is not None or error.overflow + error.nan > 0
    return broken or (contribution is not None and not math.isfinite(contribution.isolated))


def _shrinks(result: Profile, inputs: Sequence[Profile]) -> bool:
    largest = max((profile.rms for profile in inputs), default=0.0)
    return largest > 8 * result.rms
