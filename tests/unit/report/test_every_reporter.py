import pytest

from auditor.report import github, html, markdown, sarif, terminal
from tests.unit.report.factory import make_audit

AUDITS = {
    "usual": make_audit(),
    "hostile": make_audit(60, hostile=True, synthetic=True),
    "empty": make_audit(empty=True),
    "no plan": make_audit(recommended=None),
    "one format": make_audit(30, formats=("bf16",), recommended="autocast_bf16"),
    "tiny": make_audit(4),
}


@pytest.mark.parametrize("reporter", [github, html, markdown, sarif, terminal], ids=lambda m: m.__name__.split(".")[-1])
@pytest.mark.parametrize("audit", AUDITS.values(), ids=AUDITS.keys())
def test_renders(reporter, audit):
    text = reporter.render(audit)
    assert text.endswith("\n")
    assert "\x1b" not in text
    assert "Undefined" not in text
