import copy
import json
import re

import pytest

from auditor.document.codec import to_document
from auditor.document.read import audit_of
from auditor.fleet.index import headline, render, rows_of, worse
from auditor.fleet.running import KEPT, Outcome, asked_of, keep, standing
from auditor.fleet.targets import Target
from tests.unit.report.factory import make_audit


@pytest.fixture(scope="module")
def audit():
    return make_audit(20)


@pytest.fixture(scope="module")
def document(audit):
    return json.loads(json.dumps(to_document(audit)))


def target(name, folder, *words):
    return Target(name, (*words, f"{name}.py"), folder)


def test_rows_link_to_reports_and_say_why_there_is_none(tmp_path, audit):
    audit.save(tmp_path / "good one")
    targets = [target(name, tmp_path) for name in ("good one", "lost", "broken", "later")]
    ends = {
        "good one": Outcome(asked="", code=1, seconds=3.25),
        "lost": Outcome(asked="", code=0),
        "broken": Outcome(asked="", code=2, said="no such <file>"),
    }
    rows = {row.name: row for row in rows_of(targets, ends, tmp_path, None)}
    assert [row.state for row in rows.values()] == ["findings", "failed", "failed", "waiting"]
    assert rows["good one"].plan == audit.recommended
    page = render([*rows.values()], None)
    assert 'href="good%20one/report.html"' in page
    assert "no such &lt;file&gt;" in page
    (row,) = rows_of([target("good one", tmp_path)], {"good one": ends["broken"]}, tmp_path / "new", tmp_path)
    assert (row.state, row.worse) == ("failed", ["there was an audit before"])
    assert headline([*rows.values()]) == "4 models: 2 failed, 1 not audited yet."
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)


def test_what_got_worse_is_told_and_what_did_not_is_not(document):
    before = audit_of(document, "before")
    assert worse(before, audit_of(copy.deepcopy(document), "after")) == []
    after = copy.deepcopy(document)
    name = after["recommended"]
    after["plans"][name]["measured_error"] *= 5
    after["plans"][name]["predicted_speedup"] *= 0.5
    told = worse(before, audit_of(after, "after"))
    assert [line.split()[0] for line in told] == ["error", "speed-up"]
    assert worse(audit_of(after, "after"), before) == []
    after["recommended"] = None
    assert f"{name} was recommended, and no plan is" in worse(before, audit_of(after, "after"))


def test_outcomes_that_stand_are_kept_and_a_damaged_file_counts_as_none(tmp_path):
    targets = [target(name, tmp_path) for name in "abc"]
    good = Outcome(asked=asked_of(targets[0]), code=0, seconds=1.5)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").touch()
    other = Outcome(asked=asked_of(targets[2]), code=0)  # whose files are gone
    keep(tmp_path, {"a": good, "b": Outcome(asked=asked_of(targets[1]), code=-9, said="killed", tries=2), "c": other})
    assert standing(tmp_path, targets) == {"a": good}
    (tmp_path / KEPT).write_text('{"a": 1}', encoding="utf-8")
    assert standing(tmp_path, targets) == {}


def test_a_changed_file_or_option_is_asked_for_anew(tmp_path):
    (tmp_path / "a.py").write_text("x = 1", encoding="utf-8")
    first = asked_of(target("a", tmp_path))
    assert asked_of(target("a", tmp_path)) == first
    assert asked_of(target("a", tmp_path, "--seed=1")) != first
    (tmp_path / "a.py").write_text("x = 2", encoding="utf-8")
    assert asked_of(target("a", tmp_path)) != first
    symbol = Target("a", ("a.py:Net(2)",), tmp_path)
    was = asked_of(symbol)
    (tmp_path / "a.py").write_text("x = 3", encoding="utf-8")
    assert asked_of(symbol) != was
