"""Fixes of sixty models whose source has a problem: most are repaired, and none is made worse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fixes import Row, gain_reached
from tests.features.fix.problems import PROBLEMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """A row for each problem, each from a process of its own."""
    result = []
    for problem in PROBLEMS:
        command = [sys.executable, "-m", "benchmarks.fixes", problem.name, "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        result.append(Row(**json.loads(done.stdout.splitlines()[-1])))
    return result


def test_most_problems_are_repaired(rows: list[Row]) -> None:
    assert sum(row.accepted for row in rows) >= 0.7 * len(rows)


def test_no_accepted_diff_is_worse_by_plain_torch(rows: list[Row]) -> None:
    assert [(row.name, row.worse) for row in rows if row.worse] == []


def test_fixes_reach_most_of_a_persons_gain(rows: list[Row]) -> None:
    gains = [gain_reached(row) for row in rows if row.best is not None and row.best > 1.01 * row.before]
    assert sum(gains) >= 0.8 * len(gains)


def test_a_search_makes_few_audits(rows: list[Row]) -> None:
    assert max(row.audits for row in rows) <= 9
