import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from auditor.report.reporters import text
from tests.unit.report.factory import make_audit


def folded(shown: str) -> list[str]:
    """Lines but those that begin a finding, which stand whole."""
    return [line for line in shown.splitlines() if not re.match(r"\S+:\d+ [A-Z]{3}\d{3} ", line)]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("hostile", [False, True])
def test_no_line_is_wider_than_asked(width, hostile):
    shown = text(make_audit(60, hostile=hostile, synthetic=True), width=width)
    assert max(map(cell_len, folded(shown))) <= width


def test_wide_letters_count_as_two_cells():
    audit = make_audit(20)
    wide = tuple(replace(f, owner="層." * 40, message="長" * 200) for f in audit.findings)
    shown = text(replace(audit, findings=wide), width=80)
    assert max(map(cell_len, folded(shown))) <= 80


def test_color_changes_nothing_but_codes():
    from rich.text import Text

    audit = make_audit()
    colored = text(audit, color=True)
    assert "\x1b[" in colored
    assert Text.from_ansi(colored).plain.rstrip() == text(audit).rstrip()


def test_notes_are_counted_and_are_nothing_to_do():
    audit = make_audit(60)
    notes = replace(audit, findings=tuple(replace(found, severity="info") for found in audit.findings))
    shown = text(notes, width=100)
    assert "Nothing to fix" in shown and "note" in shown
    assert len(folded(shown)) == len(shown.splitlines())


@pytest.mark.parametrize("kind", [{}, {"hostile": True}, {"recommended": None}])
def test_a_terminal_shows_forty_lines_and_names_what_is_left_out(kind):
    shown = text(replace(make_audit(300, **kind), warnings=("a caution",)), width=100, color=False)
    assert len(shown.splitlines()) <= 40
    beside = text(replace(make_audit(300, **kind), warnings=("a caution",)), width=100, color=False, most=32)
    assert len(beside.splitlines()) <= 32  # a command lists its files and the next step below
    assert "A caution." in shown
    assert "RNG001" in shown
    assert "Kept  " in shown or "Kept" in shown.splitlines()[-1] or kind.get("recommended", "") is None
