"""The graph of a report in a real Chromium: opened, moved, zoomed and colored, by mouse and by keyboard."""

import pytest

from tests.browser.conftest import press
from tests.unit.report.factory import make_audit

pytestmark = pytest.mark.browser


def boxes(page):
    return page.run("[...document.querySelectorAll('#graph-box .node .name')].map((n) => n.textContent)")


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
    assert page.run(trail) == ["the model Root", "blocks", "blocks.0 … blocks.7 Block", "blocks.0 Block"]
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


def test_the_chosen_measure_colors_the_graph_and_fills_the_table(page, reports):
    page.open(reports / "usual.html")
    labels = page.run("[...document.querySelectorAll('#measure option')].map((o) => o.textContent)")
    assert labels[:2] == ["Format under the recommended plan", "FP16: verdict"]
    fills = set()
    for i, label in enumerate(labels):
        page.run(
            f"(() => {{ const m = document.getElementById('measure'); m.selectedIndex = {i}; m.dispatchEvent(new Event('change')); }})()"
        )
        fills.add(
            page.run("[...document.querySelectorAll('#graph-box rect')].map((r) => getComputedStyle(r).fill).join()")
        )
        head = page.run("document.querySelectorAll('#head th')[3].textContent")
        assert head == {"FLOPs": "FLOPs", "FP16: local error": "local error"}.get(label, head)
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


def test_what_is_looked_for_is_outlined_in_the_graph(page, reports):
    page.open(reports / "usual.html")
    hits = "[...document.querySelectorAll('#graph-box .node.hit .name')].map((n) => n.textContent)"
    look = "(() => { const f = document.getElementById('graph-find'); f.value = %r; f.dispatchEvent(new Event('input')); })()"
    page.run(look % "softmax")
    assert page.run(hits) == ["blocks"]
    assert page.run("document.getElementById('graph-note').textContent").startswith("8 matching operations")
    press(page, "#graph-box .node.module", "Enter")
    assert page.run(hits) == ["0 … 7 ×8"]  # still outlined a level below
    page.run(look % "")
    assert page.run(hits) == []
