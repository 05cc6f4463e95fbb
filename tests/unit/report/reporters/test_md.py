import re

from auditor.report.blocks import code, escape
from auditor.report.reporters import markdown
from tests.unit.report.factory import make_audit


def test_code_spans_end_where_they_should():
    assert code("a.b") == "`a.b`"
    assert code("a`b``c") == "```a`b``c```"
    assert code("`") == "`` ` ``"


def test_prose_adds_no_markup():
    assert escape("<b> *x* [y](z) a|b") == r"\<b\> \*x\* \[y\](z) a\|b"


def test_every_table_row_has_its_cells():
    rows = [line for line in markdown(make_audit(60, hostile=True)).splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows]
    assert set(widths) == {6}  # plans
