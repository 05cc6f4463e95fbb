"""The page of tested versions, and what the package declares, are those of the results; the parts of the command."""

from pathlib import Path

import pytest

from benchmarks import versions
from benchmarks.versions import Environment, Outcome

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one"/>
<testcase classname="tests.unit.test_a" name="test_two"><failure message="no"/></testcase>
<testcase classname="tests.unit.test_b" name="test_three"><skipped/></testcase>
<testcase classname="tests.unit.test_b" name="test_four"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_the_page_and_the_package_state_the_results() -> None:
    outcomes = versions.read_results()
    page = versions.PAGE.read_text(encoding="utf-8")
    assert versions.page(page, outcomes) == page
    assert versions.tested(outcomes) == versions.TESTED.read_text(encoding="utf-8")


def test_the_committed_results_are_without_failures() -> None:
    outcomes = versions.read_results()
    assert outcomes
    assert set(outcomes) <= {one.name for one in versions.ENVIRONMENTS}
    assert {name: one.failed for name, one in outcomes.items() if one.failed} == {}


def test_the_oldest_environment_has_the_lower_bounds_of_the_package() -> None:
    oldest = versions.ENVIRONMENTS[0]
    bounds = [versions._split(one)[1] for one in versions.requirements(Environment("", "")) if one.startswith("torch>")]
    assert bounds[0].startswith(">=" + oldest.pins["torch"].rpartition(".")[0])
    asked = versions.requirements(oldest)
    assert {"torch==2.11.0", "numpy==1.26.*", "transformers==5.0.*", "pydantic==2.7.*"} <= set(asked)
    assert not any(one.startswith(("ruff", "mypy", "ray")) for one in asked)


@pytest.mark.parametrize(
    ("bounds", "lowest"), [(">=1.26", "==1.26.*"), (">=2.7,<3", "==2.7.*"), (">=5", "==5.0.*"), ("==2.1.1", "==2.1.1")]
)
def test_lower_bounds(bounds: str, lowest: str) -> None:
    assert versions._lowest(bounds) == lowest


def test_counts_of_a_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    counts, failed = versions.read_report(tmp_path / "report.xml")
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failed == ["tests/unit/test_a.py::test_two", "tests/unit/test_b.py::test_four"]


def test_environments_without_failures_and_the_constraints_count_as_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(torch: str, failed: int) -> Outcome:
        counts = {"passed": 5, "failed": failed, "skipped": 0}
        return Outcome("", "3.11.7", {"torch": torch}, counts, (), (), 1)

    outcomes = {"a": outcome("2.9.1", 0), "b": outcome("2.11.0+cpu", 0), "c": outcome("2.15.0", 1)}
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\ntorchao==0.18.0\n")
    assert versions.tested(outcomes).endswith('torch = ["2.9.1", "2.13.0"]\n')
