"""Every reporter's page of fixed audits is the one that was read and accepted."""

import pytest

from tests.golden.pages import FOLDER, audits, pages
from tests.support.sentences import assert_no_false_fp32


@pytest.mark.parametrize("name", audits())
def test_pages_are_those_that_were_accepted(name: str) -> None:
    made = pages(audits()[name])
    accepted = {file.name: file.read_text(encoding="utf-8") for file in (FOLDER / name).iterdir()}
    assert made == accepted, "read the difference, then accept it with `make golden`"


@pytest.mark.parametrize("name", audits())
def test_no_page_says_fp32_where_low_precision_is_within_the_limits(name: str) -> None:
    assert_no_false_fp32(audits()[name])
