"""The HTML report in a real Chromium: nothing requested, no error, usable by keyboard, in both themes and on a phone."""

import base64
import re

import pytest

from auditor.report.reporters import html
from tests.browser.devtools import browser, find_chromium
from tests.unit.report.factory import HOSTILE, make_audit, with_reasons

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium: install it, or set CHROMIUM to its path"),
]
AUDITS = {
    "usual": {},
    "hostile": {"nodes": 60, "hostile": True, "synthetic": True},
    "empty": {"empty": True},
    "one-format": {"nodes": 30, "formats": ("bf16",), "recommended": None},
    "large": {"nodes": 3000},
}
CUT_OFF = """
[...document.querySelectorAll(".plan dt, .plan dd")].filter((e) => {
  const [own, card] = [e.getBoundingClientRect(), e.closest(".plan").getBoundingClientRect()];
  return e.scrollWidth > e.clientWidth + 1 || own.right > card.right || own.left < card.left || own.width < 8;
}).map((e) => e.textContent)
"""
ROWS = "document.querySelectorAll('#rows tr[id]').length"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CONTRAST = """
(() => {
  const parse = (c) => {
    const pad = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    pad.fillStyle = c; pad.fillRect(0, 0, 1, 1);
    return [...pad.getImageData(0, 0, 1, 1).data];
  };
  const seen = new Map();
  const rgba = (c) => { if (!seen.has(c)) seen.set(c, parse(c)); return seen.get(c); };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = (e) => { while (e) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] > 250) return c; e = e.parentElement; } return [255, 255, 255, 255]; };
  const bad = [];
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest("svg,script,.sr,.glyph,[hidden]") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) bad.push(`${e.tagName}.${e.className} ${ratio.toFixed(2)} ${e.textContent.slice(0, 30)}`);
  }
  return bad;
})()
"""


@pytest.fixture(scope="module")
def page():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, options in AUDITS.items():
        audit = make_audit(**options)
        told = with_reasons(audit) if audit.recommended else audit
        (folder / f"{name}.html").write_text(html.render(told), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_quietly(page, reports, name, scheme):
    page.open(reports / f"{name}.html", scheme=scheme)
    assert page.run("document.documentElement.dataset.theme") == scheme
    assert page.errors() == []
    assert page.requests() == []
    assert page.run(CONTRAST) == []
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


@pytest.mark.parametrize("name", ["usual", "hostile", "large"])
def test_nothing_sticks_out_on_a_phone(page, reports, name):
    page.open(reports / f"{name}.html", width=390, height=844)
    assert page.run(OVERFLOW) == 0
    assert page.errors() == []


def test_verdict_and_findings_show_without_script(page, reports):
    page.open(reports / "usual.html", script=False)
    assert len(page.screenshot(whole=True)) > 50_000


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


def boxes(page):
    return page.run("[...document.querySelectorAll('#graph-box .node .name')].map((n) => n.textContent)")


def press(page, selector, key):
    page.run(
        f"document.querySelector({selector!r}).dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )


def test_the_graph_opens_modules_and_goes_back_by_keyboard(page, reports):
    page.open(reports / "usual.html")
    assert boxes(page) == ["embed embedding", "blocks", "norm layer_norm", "head linear", "argmax", "scan mylib.scan"]
    assert page.run("document.querySelectorAll('#graph-box .edge').length") == 5 + 2
    ends = "[...document.querySelectorAll('#graph-box .end')].map((e) => [...e.querySelectorAll('text')].map((t) => t.textContent).join(' '))"
    assert page.run(ends) == ["tokens int64[8, 128]", "output 8"]
    press(page, "#graph-box .node.module", "Enter")
    assert boxes(page)[0] == "0 … 7 ×8"
    press(page, "#graph-box .node.module", "Enter")
    assert boxes(page) == [str(i) for i in range(8)]
    press(page, "#graph-box .node.module", "Enter")
    assert "norm1 layer_norm" in boxes(page)
    assert "attn" in boxes(page)
    trail = "[...document.querySelectorAll('#graph-trail button')].map((b) => b.textContent)"
    assert page.run(trail) == ["(whole model) Root", "blocks", "blocks.0 … blocks.7 Block", "blocks.0 Block"]
    assert page.run(ends) == ["from outside", "to outside"]
    classes = page.run("[...document.querySelectorAll('#graph-box .class')].map((t) => t.textContent)")
    assert classes == ["Attention", "Mlp"]
    for _ in range(3):
        press(page, "#graph-box .node", "Escape")
    assert "blocks" in boxes(page)


def test_an_operation_of_the_graph_opens_in_the_table(page, reports):
    page.open(reports / "usual.html")
    press(page, "#graph-box .node.op", "Enter")
    assert "embedding" in page.run("document.querySelector('#rows tr.active').textContent")
    assert "embed" in page.run("document.getElementById('detail').textContent")


def test_the_chosen_measure_colours_the_graph_and_fills_the_table(page, reports):
    page.open(reports / "usual.html")
    labels = page.run("[...document.querySelectorAll('#measure option')].map((o) => o.textContent)")
    assert labels[:2] == ["What the recommended plan computes in", "FP16: verdict"]
    fills = set()
    for i, label in enumerate(labels):
        page.run(
            f"(() => {{ const m = document.getElementById('measure'); m.selectedIndex = {i}; m.dispatchEvent(new Event('change')); }})()"
        )
        fills.add(
            page.run("[...document.querySelectorAll('#graph-box rect')].map((r) => getComputedStyle(r).fill).join()")
        )
        head = page.run("document.querySelectorAll('#head th')[3].textContent")
        assert head == {"FLOPs": "FLOPs", "FP16: error made here": "error made here"}.get(label, head)
    assert len(fills) >= len(labels) - 2  # two measures may look alike where few boxes are drawn
    assert page.errors() == []


def test_the_graph_shows_what_runs_low_and_why_not(page, reports):
    page.open(reports / "usual.html")
    audit = make_audit()
    box = "[...document.querySelectorAll('#graph-box .node')].find((n) => n.textContent.startsWith(%r))"
    chips = "[...document.querySelectorAll('#graph-legend .chip')].map((c) => c.textContent)"
    assert set(page.run(chips)) == {"FP16", "FP32", "mixed"}
    assert page.run(box % "embed" + ".classList.contains('is-fp32')")
    assert page.run(box % "head" + ".classList.contains('is-fp16')")
    assert "it is handed FP32 by the parameter embed.weight" in page.run(
        box % "embed" + ".querySelector('title').textContent"
    )
    inside = [r.planned.computed for r in audit.nodes if r.node.owner.startswith("blocks.")]
    low, high = inside.count("float16"), inside.count("float32")
    assert f"FP16 {low} · FP32 {high}" in page.run(box % "blocks" + ".textContent")
    widths = page.run(f"[...{box % 'blocks'}.querySelectorAll('.part')].map((p) => Number(p.getAttribute('width')))")
    assert widths[0] / sum(widths) == pytest.approx(low / (low + high), abs=0.01)


def test_the_graph_zooms_by_button_key_and_wheel_and_fits(page, reports):
    page.open(reports / "usual.html")
    scale = "document.getElementById('graph-zoom').textContent"
    width = "document.querySelector('#graph-box svg').getBoundingClientRect().width"
    own = page.run(width)
    assert page.run(scale) == "100%"
    page.run("document.getElementById('zoom-in').click()")
    assert page.run(scale) == "125%"
    assert page.run(width) == pytest.approx(1.25 * own)
    press(page, "#graph-box", "0")
    assert page.run(width) == pytest.approx(own)
    wheel = "document.getElementById('graph-box').dispatchEvent(new WheelEvent('wheel', {deltaY: -40, ctrlKey: %s, cancelable: true}))"
    assert page.run(wheel % "false")  # left to the browser, which scrolls
    assert page.run(scale) == "100%"
    assert not page.run(wheel % "true")
    assert page.run(scale) == "131%"
    for _ in range(9):
        press(page, "#graph-box", "+")
    press(page, "#graph-box", "f")
    box = page.run(
        "(({scrollWidth: a, clientWidth: b, scrollHeight: c, clientHeight: d}) => [a - b, c - d])(document.getElementById('graph-box'))"
    )
    assert box[0] <= 0
    assert box[1] <= 1
    assert page.errors() == []


def test_dragging_moves_the_graph_and_opens_nothing(page, reports):
    page.open(reports / "usual.html")
    for _ in range(5):
        press(page, "#graph-box", "+")
    module = "document.querySelector('#graph-box .node.module')"
    page.run(f"{module}.scrollIntoView({{behavior: 'instant', block: 'center'}})")
    x, y = page.run(f"(({{x, y}}) => [x + 30, y + 30])({module}.getBoundingClientRect())")
    before, trail = (
        page.run("document.getElementById('graph-box').scrollTop"),
        page.run("document.querySelectorAll('#graph-trail li').length"),
    )
    for kind, dy in (("mousePressed", 0), ("mouseMoved", -30), ("mouseMoved", -60), ("mouseReleased", -60)):
        page.send("Input.dispatchMouseEvent", type=kind, x=x, y=y + dy, button="left", buttons=1, clickCount=1)
    assert page.run("document.getElementById('graph-box').scrollTop") == before + 60
    assert page.run("document.querySelectorAll('#graph-trail li').length") == trail


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
    assert "FP32: autocast runs layer_norm in FP32 by itself." in page.run(
        "document.getElementById('detail').textContent"
    )
    heads = page.run("[...document.querySelectorAll('#head th')].map((e) => e.textContent)")
    assert page.run(f"document.querySelector('#rows tr[id]').children[{heads.index('Runs in')}].textContent") == "FP32"


def test_charts_scroll_on_a_phone(page, reports):
    page.open(reports / "usual.html", width=390, height=844)
    cut = """[...document.querySelectorAll(".chart .scroll")].map((box) => {
      const drawn = box.querySelector("svg").getBoundingClientRect().width;
      return [getComputedStyle(box).overflowX, box.scrollWidth >= Math.floor(drawn), drawn > 600, box.clientWidth < 390];
    })"""
    assert page.run(cut) == [["auto", True, True, True]] * 3


@pytest.mark.parametrize("name", ["usual", "large", "hostile"])
def test_a_report_prints_on_twelve_pages(page, reports, name):
    page.open(reports / f"{name}.html")
    pdf = base64.b64decode(page.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12


def test_hostile_names_are_text_in_the_graph_too(page, reports):
    page.open(reports / "hostile.html")
    press(page, "#graph-box .node.module", "Enter")
    assert page.run("document.images.length") == 0
    assert page.errors() == []


def test_an_unfolded_table_prints_on_few_pages(page, reports):
    page.open(reports / "large.html", width=800)
    page.run("document.getElementById('unfold').click()")
    page.send("Emulation.setEmulatedMedia", media="print")
    height = page.run("document.querySelector('.scroller').scrollHeight")
    assert 500 < height < 2_000  # what was on the screen; 3000 rows of 31 px would take 93,000
    assert page.run("getComputedStyle(document.querySelector('.bar')).display") == "none"


def test_controls_have_names(page, reports):
    page.open(reports / "usual.html")
    nameless = """[...document.querySelectorAll("button, a, input, svg, summary")].filter((e) =>
      !(e.textContent.trim() || e.getAttribute("aria-label") || (e.labels && e.labels.length))).map((e) => e.outerHTML)"""
    assert page.run(nameless) == []


@pytest.mark.parametrize("width", [1280, 900, 390])
def test_every_figure_of_a_plan_is_read_in_full(page, root, width):
    page.open(root / "reports" / "samples" / "03_handwritten_transformer.html", width=width, height=900)
    labels = page.run("[...document.querySelectorAll('.plan dt')].map((e) => e.textContent)")
    assert {"With the rules alone", "Predicted speed-up", "Predicted memory"} <= set(labels)
    assert page.run(CUT_OFF) == []
