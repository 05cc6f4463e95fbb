"""docs/architecture.md says what the code is: its table is the one that the imports give today."""

from __future__ import annotations

import re

from tests.docs.draw_architecture import DOCS, page, summary
from tests.support.structure import ORDER, PACKAGE

AGAIN = "run `make docs`"


def test_the_table_has_every_room_with_its_own_words() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert text == page(text), AGAIN
    assert [room for room in ORDER if not summary(room).endswith(".")] == []


def test_every_file_that_the_page_names_is_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:auditor|rules|tests|docs|reports)/[\w./*<>-]+)`", text))
    assert named
    root = PACKAGE.parent
    assert [name for name in sorted(named) if "<" not in name and not list(root.glob(name.rstrip("/")))] == []


def test_a_stranger_reads_45_files_at_most() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = text.partition("## In what order to read")[2].partition("##")[0]
    named = re.findall(r"`auditor/[\w/]+\.py`", listed)
    assert 20 <= len(named) == len(set(named)) <= 45
