"""axe-core on the report and on a comparison: no violation of WCAG 2.2, levels A and AA, in either theme."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.document.compare import compare
from auditor.report import diff
from auditor.reporters import html
from tests.features.compare.pages import differing, rounding
from tests.unit.report.factory import make_audit

SPEC = importlib.util.find_spec("axe_playwright_python")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(SPEC is None, reason="no axe-core: pip install --no-deps axe-playwright-python"),
]
RUN = """
axe.run(document, {runOnly: {type: "tag", values: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}})
  .then((r) => ({passes: r.passes.length, violations: r.violations.map((v) =>
    `${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160)).join(" | ")}`)}))
"""


def compared(**options):
    """A page with something in each of its tables."""
    before, after = make_audit(60), make_audit(60, **options)
    after = replace(after, max_error=0.5, findings=after.findings[1:], nodes=after.nodes[:-2])
    return diff.render(compare(before, after), ("a", "b"))


PAGES = {
    "usual": lambda: html(make_audit()),
    "hostile": lambda: html(make_audit(60, hostile=True, synthetic=True)),
    "empty": lambda: html(make_audit(empty=True)),
    "no plan": lambda: html(make_audit(30, formats=("bf16",), recommended=None)),
    "comparison": compared,
    "hostile comparison": lambda: compared(hostile=True),
    "runs that differ": differing,
    "runs that round": rounding,
}


@pytest.fixture(scope="module")
def axe() -> str:
    return Path(SPEC.origin).with_name("axe.min.js").read_text(encoding="utf-8")


QUICK = ("hostile", "hostile comparison")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in PAGES])
def test_no_violation(page, axe, name, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(PAGES[name](), encoding="utf-8")
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.open(file, scheme=scheme, width=width)
        assert page.errors() == []
        assert page.requests() == []
        page.run(axe + "; 0")
        found = page.run(RUN)
        assert found["violations"] == [], scheme
        assert found["passes"] > 10


def test_a_violation_would_be_found(page, axe, tmp_path):
    file = tmp_path / "bad.html"
    file.write_text("<!doctype html><html><title>x</title><img src='data:,'><p style='color:#ccc'>pale</p>")
    page.open(file)
    page.run(axe + "; 0")
    text = " ".join(page.run(RUN)["violations"])
    assert "image-alt" in text
    assert "color-contrast" in text
