"""Reports on a phone and on paper: nothing sticks out or is cut, and few pages take it all."""

import base64
import math
import re
from dataclasses import replace

import pytest

from auditor.features.rehearsal.page import render
from auditor.records import FlaggedRegion, Verdict
from auditor.records.generation import Generation, PartShare, StoredCache, TokenComparison
from auditor.records.quantization import QuantizedLayer, QuantizedPlan
from auditor.reporters import html
from tests.browser.conftest import AUDITS, OVERFLOW
from tests.features.compare.pages import differing, rounding
from tests.features.rehearsal.test_page import made
from tests.unit.report.factory import make_audit, with_reasons

pytestmark = pytest.mark.browser
CUT_OFF = """
[...document.querySelectorAll("#plans td")].filter((e) => {
  const [own, box] = [e.getBoundingClientRect(), e.closest(".scroll")];
  return e.scrollWidth > e.clientWidth + 1 || own.width < 8 || box.scrollWidth > box.clientWidth + (box.tabIndex === 0 ? 999 : 0);
}).map((e) => e.textContent)
"""


@pytest.mark.parametrize("name", ["usual", "hostile", "large"])
def test_nothing_sticks_out_on_a_phone(page, reports, name):
    page.open(reports / f"{name}.html", width=390, height=844)
    assert page.run(OVERFLOW) == 0
    assert page.errors() == []


OUTSIDE_OF_CHARTS = """
[...document.querySelectorAll("figure.chart svg text.tick")].filter((e) => {
  const [own, drawing] = [e.getBBox(), e.ownerSVGElement.viewBox.baseVal];
  return own.width > 0 && (own.x < 0 || own.x + own.width > drawing.width);
}).map((e) => e.textContent)
"""


def test_no_number_at_an_axis_is_cut_off(page, tmp_path):
    """The last number stands at the right edge of the axes: here 1.8x."""
    audit = make_audit(3)
    plans = {name: replace(plan, predicted_speedup=1.65, timed=None) for name, plan in audit.plans.items()}
    (tmp_path / "report.html").write_text(html(replace(audit, plans=plans)), encoding="utf-8")
    page.open(tmp_path / "report.html", width=1280)
    assert page.run("document.querySelector('#plans svg').textContent").count("1.8x") == 1
    assert page.run(OUTSIDE_OF_CHARTS) == []


@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.parametrize(("width", "tallest"), [(1280, 4_000), (390, 7_000)])
def test_a_page_is_short_before_anything_is_opened(page, reports, name, width, tallest):
    page.open(reports / f"{name}.html", width=width)
    assert page.run("document.documentElement.scrollHeight") <= tallest
    assert page.run("document.body.innerText.trim().split(/\\s+/).length") <= 1_500


@pytest.mark.parametrize(("width", "tallest"), [(1280, 4_000), (390, 7_000)])
def test_what_is_said_of_tokens_keeps_a_page_short(page, tmp_path, width, tallest):
    parts = tuple(PartShare(f"part {i}", 0.1, i, 1.0) for i in range(10))
    tokens = TokenComparison(
        1e-4, 1e-3, 0.1, 0.99, 0.01, 5.0, 1.0, 9.0, 4.0, 40, 9, kl_by_position=(1e-4,) * 32, parts=parts
    )
    caches = tuple(StoredCache(stored, 0.0, 23040.0, 0.0, tokens) for stored in ("bf16", "fp8_e4m3", "int8"))
    audit = make_audit(30)
    plans = {name: replace(plan, generated=tokens) for name, plan in audit.plans.items()}
    audit = replace(audit, plans=plans, generation=Generation(20, 64, 1280, caches=caches))
    (tmp_path / "report.html").write_text(html(audit), encoding="utf-8")
    page.open(tmp_path / "report.html", width=width)
    assert page.run("document.documentElement.scrollHeight") <= tallest
    assert page.run(OVERFLOW) == 0
    assert page.run("document.body.textContent.includes('part 9')")


def test_long_names_of_modules_and_classes_fit_a_phone(page, tmp_path):
    audit = make_audit(30)
    name = "_".join(["a_projection_of_the_second_pyramid_branch"] * 6)
    nodes = tuple(
        replace(one, node=replace(one.node, owner=f"{name}.{one.node.owner}", owner_type=name)) for one in audit.nodes
    )
    audit = replace(audit, nodes=nodes, classes={"": name, name: name})
    (tmp_path / "report.html").write_text(html(audit), encoding="utf-8")
    page.open(tmp_path / "report.html", width=390, height=844)
    assert page.run(OVERFLOW) == 0


def test_charts_scroll_on_a_phone(page, reports):
    page.open(reports / "usual.html", width=390, height=844)
    cut = """[...document.querySelectorAll(".chart .scroll:not(:has(.small))")].map((box) => {
      const drawn = box.querySelector("svg").getBoundingClientRect().width;
      return [getComputedStyle(box).overflowX, box.scrollWidth >= Math.floor(drawn), drawn > 600, box.clientWidth < 390];
    })"""
    assert page.run(cut) == [["auto", True, True, True]]


CUT_TABLES = """
[...document.querySelectorAll(".scroll:has(table)")].filter((box) => {
  const cells = [...box.querySelectorAll("tbody td")];
  return box.scrollWidth > box.clientWidth || cells.some((e) => e.scrollWidth > e.clientWidth + 1);
}).map((box) => box.textContent.slice(0, 80))
"""


def quantized(audit):
    """The audit with a layer of a long name under a scheme, and a plan of this scheme."""
    layer = QuantizedLayer(
        node="linear_1",
        scheme="int8",
        key="model.language_model.layers.17.self_attention.query_key_value_projection",
        owner="model.language_model.layers.17.self_attention.query_key_value_projection",
        op="aten.linear.default",
        effect=0.0123,
        weight_effect=0.00456,
        activation_effect=0.0114,
        decided_by="re-run",
        weight_error=0.00789,
        activation_error=0.0112,
        part="activation",
        cause="outlier channel",
        place="input channels 12, 1033 and 4021",
        remedy="fp8",
        error=0.0123,
        verdict=Verdict("unsafe", "over the budget"),
        saturated=1_234_567,
        zeroed=12_345_678,
    )
    plan = QuantizedPlan(
        "int8",
        ("int8",),
        {layer.owner: "int8", f"{layer.owner}_2": ""},
        (),
        8.0,
        8.0,
        (),
        10**9,
        0.5,
        0.6,
        1e-3,
        2e-3,
        1e-3,
        None,
        "torchao",
    )
    return replace(audit, quantization=(layer,), quantized_plans=(plan,))


@pytest.mark.parametrize("width", [1280, 390])
def test_no_table_is_cut(page, tmp_path, width):
    audit = quantized(with_reasons(make_audit(30)))
    long = replace(audit.plans["cast_fp16"].verification, measured_error=0.0123, holds=False)
    plans = {**audit.plans, "cast_fp16": replace(audit.plans["cast_fp16"], verification=long)}
    (tmp_path / "report.html").write_text(html(replace(audit, plans=plans)), encoding="utf-8")
    page.open(tmp_path / "report.html", width=width)
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert page.run("document.querySelectorAll('#quantization table').length") >= 3
    assert page.run(CUT_TABLES) == []
    assert page.run(OVERFLOW) == 0


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_a_rehearsal_looks_like_a_report(page, tmp_path, width, scheme):
    (tmp_path / "rehearsal.html").write_text(render(made()), encoding="utf-8")
    page.open(tmp_path / "rehearsal.html", width=width, scheme=scheme)
    assert page.run(CUT_TABLES) == []
    assert page.run(OVERFLOW) == 0
    assert page.run("document.querySelectorAll('#loss svg').length") == 2
    assert page.run("document.querySelector('#verdict .copy').checkVisibility()")
    page.run("document.getElementById('theme').click()")
    assert page.run("document.documentElement.dataset.theme") == ("light" if scheme == "dark" else "dark")
    page.run("localStorage.clear()")
    assert page.errors() == []


def test_rows_of_a_table_name_their_cells_on_a_phone(page, reports):
    page.open(reports / "usual.html", width=390)
    cells = "[...document.querySelectorAll('#plans .columns tr:nth-child(1) td')]"
    heads = page.run(f"{cells}.map((e) => getComputedStyle(e, '::before').content)")
    assert heads[1:] == ['"Error, no plan"', '"Error, predicted"', '"Error, measured"', '"FLOPs low"', '"Speed-up"']
    page.open(reports / "usual.html", width=1280)
    assert page.run(f"{cells}.map((e) => getComputedStyle(e, '::before').content)") == ["none"] * 6


@pytest.mark.parametrize("width", [1280, 390])
def test_the_chart_of_plans_is_seen_whole(page, reports, width):
    page.open(reports / "usual.html", width=width)
    chart = "document.querySelector('#plans svg')"
    box = f"{chart}.closest('.scroll')"
    assert page.run(f"{box}.scrollWidth <= {box}.clientWidth && {chart}.clientWidth > 300")
    outside = f"""[...{chart}.querySelectorAll("text")].filter((e) => {{
      const [own, all] = [e, {chart}].map((one) => one.getBoundingClientRect());
      return own.left < all.left || own.right > all.right || own.top < all.top || own.bottom > all.bottom;
    }}).map((e) => e.textContent)"""
    assert page.run(outside) == []
    assert page.run(f"{chart}.getAttribute('role')") == "img"
    assert page.run(f"{chart}.querySelector('title').textContent") == "Error against speed-up"


@pytest.mark.parametrize("name", ["usual", "large", "hostile"])
def test_a_report_prints_on_twelve_pages(page, reports, name):
    page.open(reports / f"{name}.html")
    pdf = base64.b64decode(page.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12


def test_an_unfolded_table_prints_on_few_pages(page, reports):
    page.open(reports / "large.html", width=800)
    page.run("document.getElementById('unfold').click()")
    page.send("Emulation.setEmulatedMedia", media="print")
    height = page.run("document.querySelector('.scroller').scrollHeight")
    assert 500 < height < 2_000  # what was on the screen; 3000 rows of 31 px would take 93,000
    assert page.run("getComputedStyle(document.querySelector('.bar')).display") == "none"


@pytest.mark.parametrize("name", ["usual", "hostile"])
def test_every_effect_is_read_in_full_on_a_phone(page, reports, name):
    page.open(reports / f"{name}.html", width=390, height=844)
    page.run("document.getElementById('unfold').click()")
    cells = "[...document.querySelectorAll('.scroller tbody td:nth-child(2), .scroller tbody td:nth-child(3)')]"
    shown = page.run(f"{cells}.map((e) => e.innerText.trim())")
    assert any("Inf/NaN" in text for text in shown)
    assert page.run(f"{cells}.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText)") == []


def test_each_column_of_what_hurts_together_is_read_on_a_phone(page, tmp_path):
    region = FlaggedRegion("fp16", ("a", "b"), "blocks.0", math.inf, math.inf, math.inf)
    (tmp_path / "report.html").write_text(html(replace(make_audit(30), regions=(region,))), encoding="utf-8")
    page.open(tmp_path / "report.html", width=390, height=844)
    tables = "[...document.querySelectorAll('#origins .scroll')].filter((e) => e.querySelector('th:nth-child(4)'))"
    assert page.run(f"{tables}.map((e) => e.scrollWidth <= e.clientWidth)") == [True]


@pytest.mark.parametrize("width", [1280, 900, 390])
def test_every_figure_of_a_plan_is_read_in_full(page, root, width):
    page.open(root / "reports" / "samples" / "03_handwritten_transformer.html", width=width, height=900)
    page.run("document.querySelectorAll('#plans details').forEach((d) => { d.open = true; })")
    labels = page.run("[...document.querySelectorAll('#plans details td')].map((e) => e.textContent)")
    assert "Predicted memory" in labels
    assert page.run(CUT_OFF) == []


def test_the_table_on_a_phone_says_what_runs(page, reports):
    page.open(reports / "usual.html", width=390, height=844)
    shown = (
        """[...document.querySelectorAll("#head th")].filter((e) => e.checkVisibility()).map((e) => e.textContent)"""
    )
    heads = page.run(shown)
    assert heads == ["Module / operation", "FP16", "BF16", "Runs in"]
    head = "document.querySelector('#head th:nth-child(5) button') || document.querySelector('#head th:nth-child(5)')"
    assert page.run(f"(({head}).textContent)") == "Runs in"
    assert page.run(f"(({head}).scrollWidth - ({head}).clientWidth)") <= 0
    cells = page.run("""[...document.querySelectorAll("#rows tr[id]")].map((row) => [...row.children].filter((e) =>
      e.checkVisibility()).map((e) => [e.textContent, e.scrollWidth <= e.clientWidth]).at(-1))""")
    assert {text for text, _ in cells} <= {"FP16", "FP32", "mixed", "–"}
    assert {"FP16"} < {text for text, _ in cells}
    assert all(fits for _, fits in cells)


@pytest.mark.parametrize("width", [1280, 390])
def test_no_button_lies_on_code(page, reports, width):
    page.open(reports / "usual.html", width=width)
    covered = """[...document.querySelectorAll(".code")].filter((box) => {
      const [code, copy] = [box.querySelector("pre"), box.querySelector(".copy")].map((e) => e.getBoundingClientRect());
      return copy.width && code.width && copy.left < code.right && copy.top < code.bottom;
    }).length"""
    assert page.run("document.querySelectorAll('.code .copy:not([hidden])').length") > 0
    assert page.run(covered) == 0


@pytest.mark.parametrize("render_page", [differing, rounding])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_two_runs_compared_fit_a_phone(page, tmp_path, render_page, width, scheme):
    (tmp_path / "compare.html").write_text(render_page(), encoding="utf-8")
    page.open(tmp_path / "compare.html", width=width, scheme=scheme)
    assert page.run(CUT_TABLES) == []
    assert page.run(OVERFLOW) == 0
    assert page.errors() == []
