"""One browser for all tests here, the reports that it opens, and how tests act on them."""

import pytest

from auditor.reporters import html
from tests.browser.devtools import browser
from tests.unit.report.factory import AUDITS as KINDS
from tests.unit.report.factory import make_audit, with_reasons

AUDITS = {**KINDS, "large": {"nodes": 3000}}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def press(page, selector, key):
    page.run(
        f"document.querySelector({selector!r}).dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )


@pytest.fixture(scope="session")
def page():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, options in AUDITS.items():
        audit = make_audit(**options)
        told = with_reasons(audit) if audit.recommended else audit
        (folder / f"{name}.html").write_text(html(told), encoding="utf-8")
    return folder
