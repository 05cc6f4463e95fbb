"""One browser for all tests here, and the reports that it opens."""

import pytest

from auditor.report.reporters import html
from tests.browser.devtools import browser
from tests.browser.pages import AUDITS
from tests.unit.report.factory import make_audit, with_reasons


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
