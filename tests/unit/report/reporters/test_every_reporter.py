import json

import pytest

from auditor.report.reporters import REPORTERS
from tests.unit.report.factory import make_audit

AUDITS = {
    "usual": make_audit(),
    "hostile": make_audit(60, hostile=True, synthetic=True),
    "empty": make_audit(empty=True),
}


@pytest.mark.parametrize("name", [name for name in REPORTERS if name != "json"])
@pytest.mark.parametrize("audit", AUDITS.values(), ids=AUDITS.keys())
def test_renders_the_same_every_time(name, audit):
    text = REPORTERS[name](audit)
    assert text.endswith("\n")
    assert "\x1b" not in text
    assert "Undefined" not in text
    assert text == REPORTERS[name](audit)


def test_json_is_what_both_files_hold():
    audit = AUDITS["usual"]
    printed, plan, measured = json.loads(REPORTERS["json"](audit)), audit.to_dict(), audit.to_measurements()
    assert printed.keys() == (plan.keys() | measured.keys()) - {"plan"}
    assert (printed["nodes"], printed["max_error"]) == (measured["nodes"], plan["max_error"])
