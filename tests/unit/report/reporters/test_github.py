import re
from collections import Counter
from dataclasses import replace

from auditor.report.reporters import github
from tests.unit.report.factory import make_audit

COMMAND = re.compile(r"^::(error|warning|notice) file=[^:,]+,line=\d+,title=[^:,]+::.+$")


def test_hostile_names_add_no_command():
    lines = github(make_audit(60, hostile=True)).splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert commands
    assert all(COMMAND.match(line) for line in commands)
    assert not [line for line in lines if "::" in line and not line.startswith("::")]
    assert "pwned%25" in commands[0]


def test_at_most_ten_of_each_level():
    audit = make_audit(200)
    spread = tuple(replace(f, source=f"model.py:{i + 1}") for i, f in enumerate(audit.findings))
    text = github(replace(audit, findings=spread))
    counts = Counter(line.split(" ")[0] for line in text.splitlines() if line.startswith("::"))
    assert counts["::warning"] == 10
    assert counts["::error"] == 1
    assert re.search(r"\d+ more causes in the report", text)
