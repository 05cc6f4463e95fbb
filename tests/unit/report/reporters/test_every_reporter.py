import json

import pytest

from auditor.report.reporters import files, names, reporter
from tests.unit.report.factory import make_audit

AUDITS = {
    "usual": make_audit(),
    "hostile": make_audit(60, hostile=True, synthetic=True),
    "empty": make_audit(empty=True),
}


@pytest.mark.parametrize("name", [name for name in names() if name != "json"])
@pytest.mark.parametrize("audit", AUDITS.values(), ids=AUDITS.keys())
def test_renders_the_same_every_time(name, audit):
    text = reporter(name).render(audit)
    assert text.endswith("\n")
    assert "\x1b" not in text
    assert "Undefined" not in text
    assert text == reporter(name).render(audit)


def test_a_reporter_is_a_file_in_the_folder():
    assert set(names()) >= {"github", "html", "json", "md", "sarif", "text"}


def test_those_that_name_a_file_are_written_to_it():
    found = files(AUDITS["usual"])
    assert list(found) == ["report.html", "findings.sarif"]
    assert found["findings.sarif"] == reporter("sarif").render(AUDITS["usual"])


def test_json_is_what_both_files_hold():
    audit = AUDITS["usual"]
    printed, plan, measured = json.loads(reporter("json").render(audit)), audit.to_json(), audit.to_measurements()
    assert printed.keys() == (plan.keys() | measured.keys()) - {"plan"}
    assert (printed["nodes"], printed["max_error"]) == (measured["nodes"], plan["max_error"])
