"""Directions, limits and shares of the kinds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from auditor.criteria.criterion import FUNCTION, KINDS, Kind, floor_of
from auditor.criteria.values import VALUES


def test_every_kind_has_its_arithmetic_and_its_words() -> None:
    assert KINDS.keys() == VALUES.keys()
    assert all(kind.name == name and kind.says and kind.unit for name, kind in KINDS.items())


def brackets(kind: Kind) -> str:
    return f"({', '.join(kind.takes)})" if kind.takes else ""


def test_the_page_on_criteria_has_every_kind_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "criteria.md").read_text(encoding="utf-8")
    rows = [f"| `{kind.name}{brackets(kind)}` | {kind.unit} | `{kind.sign}` | {kind.says} |" for kind in KINDS.values()]
    found = page.partition("<!-- kinds -->\n")[2].partition("<!-- end of kinds -->")[0].splitlines()
    assert found == rows


@pytest.mark.parametrize(
    ("kind", "value", "limit", "share"),
    [
        ("max_abs", 0.25, 0.5, 0.5),
        ("kl", 0.01, 0.04, 0.5),  # grows with the square of an error: the root of a quarter
        ("cosine", 0.99, 0.96, 0.5),  # the same: sqrt(0.01 / 0.04)
        ("top1", 0.99, 0.98, 0.5),
        ("iou", 0.8, 0.9, 2.0),
        ("psnr", 60.0, 40.0, 0.1),  # 20 dB are a factor of 10 in size
        ("psnr", math.inf, 40.0, 0.0),
        ("flips", 0.0, 0.0, 0.0),
        ("flips", 0.25, 0.0, 2.25),
        ("top1", 0.75, 1.0, 2.25),
        ("max_abs", math.nan, 1.0, math.inf),
    ],
)
def test_the_share_by_hand(kind: str, value: float, limit: float, share: float) -> None:
    assert KINDS[kind].share(value, limit) == pytest.approx(share)


@pytest.mark.parametrize("kind", [*KINDS.values(), FUNCTION])
def test_a_share_is_above_one_exactly_where_the_limit_does_not_hold(kind: object) -> None:
    for limit in (0.0, 0.1, 0.9, 1.0):
        for value in (0.0, 0.1, math.nextafter(0.1, 1), math.nextafter(0.9, 0), 0.9, 1.0, math.nan):
            assert (kind.share(value, limit) <= 1) == kind.holds(value, limit)


def test_the_floor_is_three_times_the_noise_as_long_as_outputs_are_alike() -> None:
    assert floor_of(0.0, 0.0) == 0.0
    assert floor_of(0.02, 0.01) == 0.06
    assert floor_of(5.0, 0.3) == 15.0  # in the user's own measure
    assert floor_of(0.02, 0.34) == 0.0
    assert floor_of(math.inf, 0.0) == 0.0
