"""What went wrong in one node in one format, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..formats.metrics import Damage
from ..formats.profile import Profile
from ..formats.table import Format
from ..ops.table import operation
from ..records import Contribution, NodeError


def cause_of(
    op: str, hurt: Damage, error: float, fmt: Format, result: Profile, inputs: Sequence[Profile]
) -> str | None:
    """overflow | nan | underflow | cancellation | rounding | None for an exact result.

    cancellation: an addition or subtraction whose result is so much smaller than its operands that their rounding
    weighs at least eight times what it would in the result. Source: Higham, section 1.7.
    """
    if hurt.overflow:
        return "overflow"
    if hurt.nan:
        return "nan"
    if error == 0:
        return None
    if hurt.underflow >= 0.01 and error > fmt.epsilon and result.range.min_abs < fmt.smallest_normal:
        return "underflow"
    if operation(op).cancels and error > 8 * fmt.epsilon / 2 and _shrinks(result, inputs):
        return "cancellation"
    return "rounding"


def breaks(error: NodeError, contribution: Contribution | None) -> bool:
    """Whether an operation refuses a format, or makes something non-finite of what is finite in FP32."""
    broken = error.unsupported is not None or error.overflow + error.nan > 0
    return broken or (contribution is not None and not math.isfinite(contribution.isolated))


def _shrinks(result: Profile, inputs: Sequence[Profile]) -> bool:
    largest = max((profile.rms for profile in inputs), default=0.0)
    return largest > 8 * result.rms
