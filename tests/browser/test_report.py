"""The HTML report in a real Chromium: nothing requested, no error, usable by keyboard, in both themes."""

import pytest

from tests.browser.conftest import AUDITS, OVERFLOW
from tests.unit.report.factory import HOSTILE, make_audit

pytestmark = pytest.mark.browser
ROWS = "document.querySelectorAll('#rows tr[id]').length"


@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_quietly(page, reports, name, scheme):
    page.open(reports / f"{name}.html", scheme=scheme)
    assert page.run("document.documentElement.dataset.theme") == scheme
    assert page.errors() == []
    assert page.requests() == []
    assert page.run(OVERFLOW) == 0


def test_errors_and_requests_would_be_seen(page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<script>undefinedName()</script><img src='file:///nowhere.png'>", encoding="utf-8")
    page.open(bad)
    assert page.errors()
    assert page.requests() == ["file:///nowhere.png"]


def test_themes_differ_and_the_button_switches(page, reports):
    shots = {}
    for scheme in ("light", "dark"):
        page.open(reports / "usual.html", scheme=scheme)
        shots[scheme] = page.screenshot()
        assert len(shots[scheme]) > 20_000
    assert shots["light"] != shots["dark"]
    page.run("document.getElementById('theme').click()")
    assert page.run("document.documentElement.dataset.theme") == "light"
    page.run("localStorage.clear()")


def test_a_large_table_draws_few_rows_and_opens_fast(page, reports):
    page.open(reports / "large.html")
    assert page.run("performance.getEntriesByType('navigation')[0].loadEventEnd") < 2000  # typically 200 on two cores
    page.run("document.getElementById('unfold').click()")
    assert 0 < page.run(ROWS) < 80
    before = page.run("document.querySelector('#rows tr[id]').id")
    page.run("new Promise((r) => { document.getElementById('scroller').scrollTop = 40000; setTimeout(r, 200); })")
    assert page.run("document.querySelector('#rows tr[id]').id") != before


CARDS = "[...document.querySelectorAll('#findings .finding')].filter((c) => c.checkVisibility()).map((c) => c.dataset.rules)"


def filter_findings(page, **wanted):
    for name in ("severity", "formats", "rules", "modules"):
        page.run(f"document.querySelector('#finding-filter [name={name}]').value = {wanted.get(name, '')!r}")
    page.run("document.getElementById('finding-filter').dispatchEvent(new Event('input'))")
    return page.run(CARDS)


def test_findings_are_filtered_by_severity_format_rule_and_module(page, reports):
    page.open(reports / "usual.html")
    every = page.run("document.querySelectorAll('#findings .finding').length")
    at_first = page.run(CARDS)
    assert filter_findings(page, severity="error") == ["RNG001"]
    assert "1 of" in page.run("document.getElementById('findings-shown').textContent")
    assert set(filter_findings(page, formats="bf16")) == {"SFT001", "NRM001"}
    assert len(filter_findings(page, formats="fp16")) == every
    assert set(filter_findings(page, rules="sft")) == {"SFT001"}
    assert filter_findings(page, modules="blocks.*.attn") == filter_findings(page, modules="blocks.3.attn") != []
    assert filter_findings(page, rules="RNG", severity="warning") == []
    assert filter_findings(page) == at_first
    assert page.errors() == []


def test_every_finding_can_be_opened_without_script(page, reports):
    page.open(reports / "large.html", script=False)
    assert page.run("document.getElementById('finding-filter').checkVisibility()") is False
    page.run("document.querySelectorAll('#findings details').forEach((d) => { d.open = true; })")
    cards = page.run("[...document.querySelectorAll('#findings .finding')].map((c) => c.checkVisibility())")
    assert cards
    assert all(cards)


def type_filter(page, text):
    page.run(
        f"(() => {{ const f = document.getElementById('filter'); f.value = {text!r}; f.dispatchEvent(new Event('input')); }})()"
    )
    page.run("new Promise((r) => setTimeout(r, 250))")


def test_filter_hide_safe_and_sort(page, reports):
    page.open(reports / "usual.html")
    type_filter(page, "softmax")
    assert page.run("document.getElementById('shown').textContent") == "8 of 120 operations"
    type_filter(page, "rng001")
    assert page.run("document.getElementById('shown').textContent") == "1 of 120 operations"
    type_filter(page, "")
    page.run("document.getElementById('hide-safe').click()")
    shown = int(page.run("document.getElementById('shown').textContent").split(" ")[0])
    audit = make_audit()
    assert shown == sum(any(v.verdict != "safe" for v in r.verdicts.values()) for r in audit.nodes)
    page.run("document.querySelectorAll('#head button')[1].click()")
    assert page.run("document.querySelectorAll('#head th')[1].getAttribute('aria-sort')") == "descending"
    assert "non-finite" in page.run("document.querySelector('#rows tr[id]').textContent")


def test_keyboard_moves_opens_and_folds(page, reports):
    page.open(reports / "usual.html")
    press = "document.getElementById('scroller').dispatchEvent(new KeyboardEvent('keydown', {key: %r, bubbles: true}))"
    page.run(press % "j")
    assert page.run("document.querySelector('#rows tr.active').id") == "row-0"
    page.run(press % "j")
    assert page.run("document.querySelector('#rows tr.active').textContent").strip().startswith("▾blocks")
    count = page.run(ROWS)
    page.run(press % "ArrowLeft")
    assert page.run(ROWS) < count
    page.run(press % "Enter")
    assert page.run(ROWS) == count


def test_a_link_opens_its_operation(page, reports):
    page.open(reports / "usual.html")
    page.run("document.querySelector('.finding .jump').click()")
    page.run("new Promise((r) => setTimeout(r, 250))")
    assert "12" in page.run("document.getElementById('detail').textContent")
    assert "alone it turns 12 finite values into Inf" in page.run("document.getElementById('detail').textContent")


def test_hostile_names_are_text(page, reports):
    page.open(reports / "hostile.html")
    type_filter(page, "alert")
    page.run("document.querySelector('#rows tr[id]').click()")
    assert HOSTILE.replace("\x1b", "") in page.run("document.getElementById('detail').textContent").replace("\x1b", "")
    assert page.run("document.images.length") == 0
    assert page.errors() == []


def type_key(page, key):
    """A key as a reader presses it, wherever the focus is."""
    page.run(
        f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true, cancelable: true}}))"
    )


def test_keys_work_without_a_focus_anywhere(page, reports):
    page.open(reports / "usual.html")
    assert page.run("document.activeElement === document.body")
    type_key(page, "j")
    assert page.run("document.querySelector('#rows tr.active').id") == "row-0"
    page.run("document.activeElement.blur()")
    type_key(page, "j")
    type_key(page, "j")
    type_key(page, "k")
    assert page.run("document.querySelector('#rows tr.active').id") == "row-1"
    page.run("document.getElementById('filter').focus()")
    type_key(page, "j")
    assert page.run("document.querySelector('#rows tr.active').id") == "row-1"


def test_a_question_mark_lists_the_keys(page, reports):
    page.open(reports / "usual.html")
    opened = "document.getElementById('keys').open"
    assert not page.run(opened)
    type_key(page, "?")
    assert page.run(opened)
    listed = page.run("[...document.querySelectorAll('#keys kbd')].map((k) => k.textContent)")
    assert {"?", "/", "j", "k", "+", "f", "t"} <= set(listed)
    type_key(page, "j")
    assert page.run("document.querySelector('#rows tr.active')") is None
    page.run("document.querySelector('#keys button').click()")
    assert not page.run(opened)
    theme = page.run("document.documentElement.dataset.theme")
    type_key(page, "t")
    assert page.run("document.documentElement.dataset.theme") != theme
    page.run("localStorage.clear()")


def test_the_table_says_what_an_operation_reads_computes_in_and_gives(page, reports):
    page.open(reports / "usual.html")
    type_filter(page, "norm layer_norm norm")
    page.run("document.querySelector('#rows tr[id]').click()")
    told = page.run("[...document.querySelectorAll('#detail .ran dd')].map((e) => e.textContent)")
    assert told == ["FP16", "FP32", "FP32"]
    assert "FP32: autocast always runs layer_norm in FP32." in page.run("document.getElementById('detail').textContent")
    heads = page.run("[...document.querySelectorAll('#head th')].map((e) => e.textContent)")
    assert page.run(f"document.querySelector('#rows tr[id]').children[{heads.index('Runs in')}].textContent") == "FP32"
