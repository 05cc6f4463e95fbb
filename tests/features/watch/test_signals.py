"""What in the signals of a training is worth a capsule."""

import math
from typing import Any

import pytest

from auditor.features.watch.signals import Judge, Signal


def signal(step: int, **values: Any) -> Signal:
    given = {"loss": 1.0, "norm": 1.0, "scale": None, "rate": 1e-3}
    return Signal(step, 0, **{**given, **values})


def kinds(series: list[dict[str, Any]]) -> list[tuple[int, str]]:
    judge = Judge()
    return [(i, one.kind) for i, values in enumerate(series) for one in judge.judge(signal(i, **values))]


def wave(i: int) -> dict[str, Any]:
    return {"loss": 1 + 0.1 * math.sin(i), "norm": 2 + math.cos(i)}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"loss": math.nan}, ["loss-not-finite"]),
        ({"loss": math.inf, "norm": math.nan}, ["loss-not-finite"]),
        ({"norm": math.inf}, ["gradients-not-finite"]),
        ({"loss": None, "norm": None}, []),
        ({"loss": 30.0}, ["loss-spike"]),
        ({"norm": 40.0}, ["gradient-spike"]),
        ({"loss": 3.0, "norm": 4.0}, []),
        ({"rate": math.nan}, ["rate-not-finite"]),
        ({"flushed": 0.9}, ["gradients-flushed"]),
    ],
)
def test_one_step_after_fifty_usual_ones(last: dict[str, Any], expected: list[str]) -> None:
    assert kinds([*map(wave, range(50)), {**wave(50), **last}]) == [(50, one) for one in expected]


def test_lost_updates_count_from_the_second_sample_and_not_at_the_end_of_a_schedule() -> None:
    lost = [{"lost": 0.6}, {}, {"lost": 0.6}]
    assert kinds(lost) == [(2, "updates-lost")]
    assert kinds([{"lost": 0.6}, {"lost": 0.1}, {"lost": 0.6}]) == []
    assert kinds([{}, *({"lost": 0.6, "rate": 1e-7} for _ in range(3))]) == []


def test_the_search_for_a_loss_scale_is_no_failure() -> None:
    """A GradScaler skips until it has found its scale, and again after it has grown."""
    down = [{"scale": 65536.0 / 2**i, "skipped": True, "norm": None} for i in range(8)]
    holds = [{**wave(i), "scale": 256.0} for i in range(60)]
    grown = [{"scale": 512.0, "skipped": True, "norm": None}]
    assert kinds([*down, *holds, *grown, *holds]) == []


def test_a_skip_at_a_scale_that_worked_is_one() -> None:
    holds = [{**wave(i), "scale": 256.0} for i in range(60)]
    skips = [{"scale": 256.0 / 2**i, "skipped": True, "norm": None} for i in range(9)]
    found = kinds([*holds, *skips])
    assert found[0] == (60, "skipped")
    assert (63, "skips-in-a-row") in found
    assert (68, "scale-collapsed") in found


def test_gradients_clipped_while_scaled_have_a_norm_that_is_constant_and_tiny() -> None:
    clipped = [{"norm": 1.0 / 65536, "scale": 65536.0}] * 16
    assert kinds(clipped) == [(15, "clipped-while-scaled")]
    assert kinds([{"norm": 1.0, "scale": 65536.0}] * 40) == []  # clipped after unscaling
