"""Causes of small, constructed errors, each name argued beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from auditor.measure.causes import breaks, cause_of, explained
from auditor.numerics.formats import FORMATS
from auditor.numerics.histogram import Deviation, Profile
from auditor.records import Contribution, NodeError

FP16, BF16 = FORMATS["fp16"], FORMATS["bf16"]
UNHURT = Deviation()
ONES = torch.ones(4)


def cause(
    op: str,
    error: float,
    hurt: Deviation = UNHURT,
    result: Tensor = ONES,
    inputs: tuple[Tensor, ...] = (ONES,),
    divisor: Profile | None = None,
    divides: bool = False,
) -> str | None:
    return cause_of(
        op, replace(hurt, error=error), FP16, Profile(result), [Profile(x) for x in inputs], divisor, divides
    )


def test_non_finite_results_come_first() -> None:
    assert cause("mul", float("inf"), Deviation(overflow=1, nan=1, underflow=0.5)) == "overflow"
    assert cause("sub", float("inf"), Deviation(nan=1, underflow=0.5)) == "nan"


def test_an_exact_result_has_no_cause() -> None:
    assert cause("mul", 0.0) is None
    assert cause("mul", 0.0, Deviation(subnormal=1.0)) is None  # subnormal, yet exact


def test_underflow_needs_a_share_of_the_entries_and_an_error_beyond_rounding() -> None:
    flushed, tiny = Deviation(underflow=0.01), ONES * 1e-9  # half of fp16's smallest number is 3e-8
    assert cause("mul", 0.1, flushed, tiny) == "underflow"
    assert cause("mul", 0.1, Deviation(underflow=0.0099), tiny) == "rounding"
    assert cause("mul", 2.0**-10, flushed, tiny) == "rounding"  # epsilon of fp16: the flushed entries weigh nothing


@pytest.mark.parametrize("hurt", [Deviation(overflow=1), Deviation(nan=1)])
def test_a_divisor_that_vanishes_is_no_overflow(hurt: Deviation) -> None:
    vanished, held = (Profile(ONES * size) for size in (2e-8, 6e-8))  # FP16's smallest number is 6e-8
    assert cause("log", float("inf"), hurt, divisor=vanished) == "underflow"
    assert cause("log", float("inf"), hurt, divisor=held) == ("overflow" if hurt.overflow else "nan")
    beyond = ONES * 1e5  # FP16 ends at 65504: what does not fit would not fit whatever it is divided by
    assert cause("div", float("inf"), hurt, beyond, divisor=vanished) == ("overflow" if hurt.overflow else "nan")


def test_few_bits_of_what_something_divides_by_are_underflow() -> None:
    subnormal = Profile(ONES * 3e-7)
    assert cause("log", 0.002, divisor=subnormal) == "underflow"  # above 2^-10, which rounding does not reach
    assert cause("log", 2.0**-11, divisor=subnormal) == "rounding"
    assert cause("add", 1e-6, Deviation(underflow=0.001), divides=True) == "underflow"
    assert cause("add", 1e-6, Deviation(subnormal=0.01), divides=True) == "underflow"
    assert cause("add", 1e-6, Deviation(subnormal=0.01)) == "rounding"


def test_what_vanishes_and_turns_the_outputs_non_finite_later_is_underflow() -> None:
    ends, stays = (Contribution(size, 0.1, 0.0) for size in (float("inf"), 0.5))

    def after(error: NodeError, effect: Contribution) -> str | None:
        return explained({"x": {"fp16": error}}, {"x": {"fp16": effect}})["x"]["fp16"].cause

    assert after(NodeError(underflow=0.001, cause="rounding"), ends) == "underflow"
    assert after(NodeError(underflow=0.001, cause="rounding"), stays) == "rounding"
    assert after(NodeError(cause="rounding"), ends) == "rounding"
    assert after(NodeError(underflow=0.001, overflow=3, cause="overflow"), ends) == "overflow"
    assert after(NodeError(underflow=0.001, cause="cancellation"), ends) == "cancellation"


@pytest.mark.parametrize("op", ["sub", "rsub", "add", "sum", "mean", "var"])
def test_cancellation_in_a_sum(op: str) -> None:
    # operands of 1, a result of 0.1: ten times smaller, and an error above 8 * 2^-11 = 0.0039
    assert cause(op, 0.004, result=ONES / 10) == "cancellation"
    assert cause(op, 0.0039, result=ONES / 10) == "rounding"
    assert cause(op, 0.004, result=ONES / 8) == "rounding"  # eight times smaller is not more than eight


def test_what_does_not_cancel() -> None:
    assert cause("mul", 0.004, result=ONES / 10) == "rounding"  # a product
    assert cause("add", 0.004, result=ONES / 10, inputs=(torch.empty(0),)) == "rounding"
    assert cause("add", 0.004, inputs=()) == "rounding"


def test_cancellation_depends_on_the_format() -> None:
    assert (
        cause_of("sub", Deviation(error=0.03), BF16, Profile(ONES / 10), [Profile(ONES)]) == "rounding"
    )  # 8 * 2^-8 = 0.03125
    assert cause_of("sub", Deviation(error=0.032), BF16, Profile(ONES / 10), [Profile(ONES)]) == "cancellation"


def test_a_break_is_a_refusal_or_something_that_turns_non_finite() -> None:
    whole = Contribution(0.5, 0.5, 0.0)
    for broken in (NodeError(unsupported="no kernel"), NodeError(overflow=1), NodeError(nan=1)):
        assert breaks(broken, whole)
        assert breaks(broken, None)
    for moved in (float("inf"), float("nan")):
        assert breaks(NodeError(), Contribution(moved, 0.0, 0.0))
    assert not breaks(NodeError(local_error=3.0), whole)
    assert not breaks(NodeError(), None)
