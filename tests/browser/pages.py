"""The reports that tests open in a browser, and how they act on them."""

from tests.unit.report.factory import AUDITS as KINDS

AUDITS = {**KINDS, "large": {"nodes": 3000}}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def press(page, selector, key):
    page.run(
        f"document.querySelector({selector!r}).dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )
