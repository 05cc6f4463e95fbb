from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from auditor.records import ScopeChoice
from auditor.report.page import shorten
from auditor.report.reporters import text
from tests.unit.report.factory import make_audit


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("hostile", [False, True])
def test_no_line_is_wider_than_asked(width, hostile):
    shown = text.render(make_audit(60, hostile=hostile, synthetic=True), width=width)
    assert max(map(cell_len, shown.splitlines())) <= width


@given(st.text(max_size=200), st.integers(2, 90))
def test_shortened_text_fits_and_short_text_is_untouched(text, width):
    short = shorten(text, width)
    assert cell_len(short) <= width
    assert short == text or cell_len(text) > width


def test_wide_letters_count_as_two_cells():
    audit = make_audit(20)
    wide = tuple(replace(f, owner="層." * 40, message="長" * 200) for f in audit.findings)
    shown = text.render(replace(audit, findings=wide))
    assert max(map(cell_len, shown.splitlines())) <= 80


def test_names_cannot_drive_the_terminal():
    shown = text.render(make_audit(60, hostile=True))
    assert "\x1b" not in shown
    assert "\\x1b[31m" in shown


def test_color_changes_nothing_but_codes():
    from rich.text import Text

    audit = make_audit()
    colored = text.render(audit, color=True)
    assert "\x1b[" in colored
    assert Text.from_ansi(colored).plain.rstrip() == text.render(audit).rstrip()


def test_the_summary_answers_first():
    lines = text.render(make_audit()).splitlines()
    assert lines[3] == "Verdict   Run it in FP16 under autocast, keeping 2 modules in FP32."
    assert any(line.split() == ["RNG001", "error", "blocks.5.attn.qkv", "model.py:21"] for line in lines)
    assert any(line.startswith("*  FP16 under autocast") and "8.3e-4" in line for line in lines)


def test_no_cell_of_the_plans_is_cut_where_there_is_room():
    audit = make_audit(60)
    lost = {
        name: replace(found, finite=False, measured_error=None, failure="x") for name, found in audit.baselines.items()
    }
    lines = text.render(replace(audit, baselines=lost), width=80, color=False).splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("Plan"))
    table = lines[start : start + 1 + len(audit.plans)]
    assert all("…" not in line and len(line) <= 80 for line in table)
    assert all("fails to run" in line for line in table[1:])


def test_islands_say_which_blocks_they_are():
    audit = make_audit(120)
    plan = audit.plans["autocast_fp16"]
    scopes = {"": plan.scopes[""], **{f"blocks.{i}.attn": ScopeChoice("fp32", ("SFT001",)) for i in (2, 5)}}
    said = text.render(
        replace(audit, plans={**audit.plans, plan.name: replace(plan, scopes=scopes)}), width=80, color=False
    )
    assert "blocks.{2,5}.attn" in said


def test_a_reason_that_does_not_fit_beside_its_module_stands_whole_below_it():
    audit = make_audit(40)
    plan = audit.plans["autocast_fp16"]
    why = "low, it would hand on low values to head, where linear_28 would be handed two dtypes, which raises an error"
    scopes = {"": plan.scopes[""], "blocks.2.attn": ScopeChoice("fp32", (why,))}
    said = text.render(
        replace(audit, plans={**audit.plans, plan.name: replace(plan, scopes=scopes, reasons=())}),
        width=80,
        color=False,
    )
    assert why in " ".join(said.split())
    assert all(len(line) <= 80 for line in said.splitlines())
