"""Planted bugs and clean pairs: a few quickly, all of them in the slow tests."""

import pytest

from auditor.features.compare.compare import Comparison
from tests.features.compare.planted import BUGS, CLEAN, Change, compared, is_right

QUICK = (0, 26, 42, 52)
"""Bugs of the quick tests: two in the same implementation, two in ports."""

FOUND, RIGHT, ALARMS = 57, 55, 1
"""At least so many of the bugs are found, and at the right place; at most so many clean pairs differ."""


def is_clean(found: Comparison) -> bool:
    return found.verdict in ("equal", "stored")


@pytest.mark.parametrize("change", [BUGS[index] for index in QUICK], ids=lambda change: change.new[:30])
def test_a_planted_bug_is_found(change: Change, tmp_path) -> None:
    found = compared(change, tmp_path)
    assert found.verdict == "differ"
    assert is_right(change, found)


@pytest.mark.parametrize("change", [CLEAN[3], CLEAN[5]], ids=lambda change: change.file)
def test_a_port_is_clean(change: Change, tmp_path) -> None:
    assert is_clean(compared(change, tmp_path))


def test_there_are_sixty_of_each() -> None:
    assert len(set(BUGS)) == 60
    assert len(set(CLEAN)) == 60


@pytest.mark.slow
def test_planted_bugs(tmp_path) -> None:
    results = [(change, compared(change, tmp_path)) for change in BUGS]
    differing = [(change, found) for change, found in results if found.verdict == "differ"]
    assert len(differing) >= FOUND
    assert sum(is_right(change, found) for change, found in differing) >= RIGHT


@pytest.mark.slow
def test_clean_pairs(tmp_path) -> None:
    alarms = [change for change in CLEAN if not is_clean(compared(change, tmp_path))]
    assert len(alarms) <= ALARMS, alarms
