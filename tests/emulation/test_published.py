"""The emulation gives what real GPUs printed."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.emulation.published import ROWS, UNKNOWABLE, Result, emulated_result, matches, native_result, short
from tests.emulation.published_row import PublishedResult


@cache
def emulated(row: PublishedResult) -> Result:
    return emulated_result(row)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_the_emulation_gives_what_cuda_printed(row: PublishedResult) -> None:
    result = emulated(row)
    assert matches(row, result) or row.id in UNKNOWABLE, f"CUDA {short(row.printed)}, emulated {result}"


def test_every_row_is_of_its_own_source() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_few_rows_are_unknowable_and_each_has_a_reason() -> None:
    assert len(UNKNOWABLE) <= 3
    assert set(UNKNOWABLE) <= {row.id for row in ROWS}
    assert all(UNKNOWABLE.values())


def test_the_page_states_how_often_the_emulation_is_right_where_cpu_kernels_are_wrong(root: Path) -> None:
    page = root / "benchmarks" / "results" / "published.md"
    text = page.read_text(encoding="utf-8")
    assert [row.id for row in ROWS if row.call not in text] == [], "run `python -m benchmarks.published`"
    stated = re.search(r"own kernels are wrong in (\d+)\. In (\d+) of these, the emulation is right", text)
    assert stated is not None
    wrong = [row for row in ROWS if not matches(row, native_result(row))]
    right = [row for row in wrong if matches(row, emulated(row))]
    # On another CPU a few kernels differ, which moves the share by less than one row that the emulation loses.
    assert len(right) / len(wrong) >= int(stated[2]) / int(stated[1]) - 0.015
