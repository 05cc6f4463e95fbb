"""The share never falls, ends below 1 until the audit does, and says nothing of the end before anything was measured."""

from __future__ import annotations

from itertools import pairwise

import pytest

from auditor.progress.forecast import AUDIT, Forecast, duration
from auditor.progress.shown import said

Run = list[tuple[str, float]]
"""Stages and how long each takes."""

VIT: Run = [
    ("capture", 3.6),
    ("measure", 8.5),
    ("regions", 2.0),
    ("classify", 0.2),
    ("baseline", 5.9),
    ("plan", 8.0),
    ("follow", 2.0),
]
GPT: Run = [
    ("capture", 5.1),
    ("measure", 14.0),
    ("classify", 0.3),
    ("baseline", 13.1),
    ("plan", 22.3),
    ("follow", 2.5),
]
"""A ViT-B/16 and a GPT-2 small, batch 4, as they were: plans are searched for."""

LONG_PLAN: Run = [("capture", 1), ("measure", 10), ("regions", 0.1), ("classify", 1), ("baseline", 4), ("plan", 130)]
LONG_BASELINE: Run = [("capture", 1), ("measure", 10), ("regions", 0.1), ("classify", 1), ("baseline", 60), ("plan", 9)]
SHORT_PLAN: Run = [("capture", 5), ("measure", 40), ("regions", 0.1), ("classify", 1), ("baseline", 1), ("plan", 1)]


def played(
    run: Run, nodes: int = 100, step: float = 0.25, training: bool = False
) -> list[tuple[str, float, float, float | None]]:
    """(stage, time, share, seconds left) at every step; nodes take the first 55 % of `measure`."""
    forecast, now, told = Forecast(training), 0.0, []
    for stage, seconds in run:
        forecast.heard(stage, "", 0, nodes if stage == "measure" else 0, now)
        begun = now
        while now < begun + seconds:
            if stage == "measure":
                done = min(nodes, int(nodes * (now - begun) / (0.55 * seconds)))
                forecast.heard(stage, "", done, nodes, now)
            told.append((stage, now, forecast.share(now), forecast.left(now)))
            now += step
    return told


@pytest.mark.parametrize("run", [VIT, GPT, LONG_PLAN, LONG_BASELINE, SHORT_PLAN])
def test_the_share_only_grows_and_is_never_all(run: Run) -> None:
    shares = [share for _, _, share, _ in played(run)]
    assert all(a <= b for a, b in pairwise(shares))
    assert shares[0] == 0
    assert shares[-1] < 1
    moving = [share for stage, _, share, _ in played(LONG_PLAN) if stage == "plan"]
    assert moving[-1] > moving[len(moving) // 2] > moving[0]  # an overrun moves too
    assert len({round(share, 6) for share in moving}) > len(moving) / 2


@pytest.mark.parametrize("run", [VIT, GPT])
def test_until_plans_are_made_the_end_is_a_lower_bound_and_then_about_right(run: Run) -> None:
    told = played(run)
    end = told[-1][1]
    known = [(stage, now, share, left) for stage, now, share, left in told if left is not None]
    assert known[0][1] < 0.15 * end
    for stage, now, share, left in known:
        if stage not in ("plan", "follow"):
            assert left <= end - now
        else:
            assert left == pytest.approx(end - now, abs=0.2 * end)
        assert share == pytest.approx(now / end, abs=0.15)
    assert {stage for stage, *_ in known} == {stage for stage, _ in run} - {"capture"}


@pytest.mark.parametrize("run", [VIT, GPT, LONG_PLAN, LONG_BASELINE, SHORT_PLAN])
def test_more_than_is_true(run: Run) -> None:
    forecast, end, now = Forecast(), sum(seconds for _, seconds in run), 0.0
    for stage, seconds in run:
        for step in range(8):
            forecast.heard(stage, "", min(100, 40 * step) if stage == "measure" else 0, 100, now + seconds * step / 8)
            left = forecast.left(now + seconds * step / 8)
            if left is not None and stage not in ("plan", "follow"):
                assert forecast.open(now + seconds * step / 8)
                assert left <= end - (now + seconds * step / 8)
        now += seconds


def test_a_plan_stage_that_may_end_at_once_tells_no_end() -> None:
    forecast = Forecast()
    for stage, at in (("capture", 0.0), ("measure", 1.0), ("baseline", 21.0), ("plan", 31.0)):
        forecast.heard(stage, "", 9, 9, at)
    assert forecast.left(31.0) is None
    assert forecast.left(33.0) is None
    assert forecast.left(37.0) == pytest.approx(1.4 * 10 - 6 + 0.15 * 21, abs=1)  # and what follows


def test_a_long_search_for_plans_neither_shows_the_end_nor_stops() -> None:
    told = [(share, left) for stage, _, share, left in played(LONG_PLAN) if stage == "plan"]
    half = told[len(told) // 2]
    assert half[0] < 0.9
    assert half[1] is not None
    assert half[1] > 5


def test_a_stage_that_is_late_says_so() -> None:
    forecast = Forecast()
    forecast.heard("load", "", 0, 0, 0.0)
    forecast.heard("capture", "", 0, 0, 10.0)
    forecast.heard("measure", "", 100, 100, 11.0)
    forecast.heard("baseline", "", 0, 0, 21.0)
    forecast.heard("plan", "", 0, 0, 25.0)
    assert forecast.left(29.0) == pytest.approx(1.4 * 4 - 4 + 0.18 * 11, abs=1)
    assert [forecast.late(25.0 + spent) for spent in (0, 5, 8, 60)] == [False, False, False, True]
    assert said(forecast, 24.0 + 60).count("more than") == 1
    assert said(forecast, 30.0).count("about") == 1


def test_nothing_is_said_before_a_tenth_of_the_nodes_ran() -> None:
    forecast = Forecast()
    forecast.heard("load", "model.py", 0, 0, 0.0)
    forecast.heard("capture", "", 0, 0, 5.0)
    forecast.heard("measure", "", 0, 100, 8.0)
    assert (forecast.share(8.0), forecast.left(8.0)) == (0.0, None)
    forecast.heard("measure", "", 9, 100, 9.0)
    assert forecast.left(9.0) is None
    forecast.heard("measure", "", 10, 100, 9.0)
    assert forecast.left(9.0) == pytest.approx(9)  # of 10 s of nodes, whatever comes after


def test_the_place_of_a_stage_among_all() -> None:
    forecast = Forecast()
    forecast.heard("capture", "", 0, 0, 0.0)
    assert forecast.place == (1, len(AUDIT))
    whole = Forecast(training=True)
    whole.heard("load", "", 0, 0, 0.0)
    whole.heard("training", "", 0, 0, 1.0)
    assert whole.place == (5, 11)


def test_stages_that_nobody_knows_do_not_break_it() -> None:
    forecast = Forecast()
    forecast.heard("measure", "", 5, 5, 0.0)
    forecast.heard("upload", "", 0, 0, 10.0)
    assert forecast.left(11.0) is not None
    assert forecast.place == (len(AUDIT), len(AUDIT))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (65, "1:05 min"), (3720, "1:02 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_users_own_score_has_its_stages_and_its_time() -> None:
    run = [("FP32 score", 5.0), *VIT[:-1], ("scores", 20.0), ("follow", 0.2)]
    told = played(run)
    end = told[-1][1]
    in_plan = [(now, left) for stage, now, _, left in told if stage == "plan" and left is not None]
    assert len(in_plan) > 20
    assert all(left == pytest.approx(end - now, abs=0.35 * end) for now, left in in_plan)
    forecast = Forecast()
    forecast.heard("FP32 score", "", 0, 0, 0.0)
    assert forecast.place == (1, len(AUDIT) + 2)
    forecast.heard("scores", "", 0, 0, 1.0)
    assert forecast.place == (len(AUDIT) + 1, len(AUDIT) + 2)
