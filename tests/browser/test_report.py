"""The HTML report in a real Chromium: nothing requested, no error, usable by keyboard, in both themes and on a phone."""

import pytest

from auditor.report.reporters import html
from tests.browser.devtools import browser, find_chromium
from tests.unit.report.factory import HOSTILE, make_audit

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
        (folder / f"{name}.html").write_text(html.render(make_audit(**options)), encoding="utf-8")
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
    assert page.run("document.querySelectorAll('#graph-box .edge').length") == 5
    press(page, "#graph-box .node.module", "Enter")
    assert boxes(page)[0] == "0 … 7 ×8"
    press(page, "#graph-box .node.module", "Enter")
    assert boxes(page) == [str(i) for i in range(8)]
    press(page, "#graph-box .node.module", "Enter")
    assert "norm1 layer_norm" in boxes(page)
    assert "attn" in boxes(page)
    trail = "[...document.querySelectorAll('#graph-trail button')].map((b) => b.textContent)"
    assert page.run(trail) == ["(whole model)", "blocks", "blocks.0 … blocks.7", "blocks.0"]
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
    assert labels[:2] == ["FP16: moves the output", "FP16: verdict"]
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
