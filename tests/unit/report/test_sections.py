"""Looks of a terminal, charts, comparisons, noise and scores: each section says what its records hold."""

import math
import sys
from dataclasses import replace

import pytest

from auditor.records import Noise, Plan, ScopeChoice, Score, Verification
from auditor.report.blocks import WIDEST, WIDTH, looks
from auditor.report.charts import BINS, HEIGHT, depth_chart
from auditor.report.diff import error, exceptions
from auditor.report.plans import advice, score_headline
from auditor.report.view import NAMED, noise
from tests.golden.pages import timed_and_scored
from tests.unit.report.factory import make_audit


@pytest.fixture
def environment(monkeypatch):
    """environment(tty, columns, **variables): nothing else of the real one is left."""

    def become(tty: bool, columns: int = 100, **variables: str) -> None:
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"COLUMNS": str(columns), **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)

    return become


@pytest.mark.parametrize(
    ("tty", "variables", "expected"),
    [
        (True, {}, (100, True)),
        (True, {"NO_COLOR": "1"}, (100, False)),
        (True, {"NO_COLOR": ""}, (100, True)),
        (True, {"TERM": "dumb"}, (100, False)),
        (False, {}, (100, False)),
        (False, {"FORCE_COLOR": "1"}, (100, True)),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, (100, False)),
    ],
)
def test_looks(environment, tty, variables, expected):
    environment(tty, **variables)
    assert looks() == expected


def test_a_wide_terminal_is_not_filled(environment):
    environment(True, columns=400)
    assert looks() == (WIDEST, True)


def points(path):
    return [tuple(map(float, p.split())) for p in path.replace("M", "L").split("L") if p]


@pytest.mark.parametrize("nodes", [6, 3000])
def test_depth_chart_stays_in_its_frame_and_merges_long_models(nodes):
    chart = depth_chart(make_audit(nodes))
    assert len(chart.rows) <= BINS
    per_point = math.ceil((nodes - 2) / BINS)  # the two nodes without a local error are not drawn
    assert (f"worst of {per_point} " in chart.about) is (per_point > 1)
    for kind, path in chart.paths:
        if kind.startswith("line"):
            assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points(path))


def test_non_finite_errors_are_marked_and_break_the_line_and_the_plan_has_its_own():
    audit = make_audit(25)
    errors = {r.node.name: 1e-3 for r in audit.nodes if r.node.floating}
    chart = depth_chart(replace(audit, plan_errors=errors))
    paths = dict(chart.paths)
    assert paths["gone fp16"].count("M") == 8  # the overflow and its 7 heirs
    assert len(points(paths["line fp16"])) == 23 - 8
    assert not paths["gone bf16"]
    line = points(paths["line plan"])
    assert len(line) == 24  # the operation without a kernel runs in FP32 under the plan
    assert len({y for _, y in line}) == 1
    assert ("gone", "× non-finite") in chart.legend


def plan(fmt: str, measured: float | None, *exceptions: tuple[str, str]) -> Plan:
    scopes = {path: ScopeChoice(fmt, keep=tuple(n for p, n in exceptions if p == path)) for path in ("", "head")}
    return Plan(f"cast_{fmt}", "cast", fmt, scopes, 0.001, 0.5, 1.5, Verification(measured))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no plan"),
        (plan("fp16", 0.002), "0.0020"),
        (plan("fp16", None), "failed"),
        (plan("fp8_e4m3", None), "not run"),
    ],
)
def test_a_plan_that_cannot_be_run_has_not_failed(found: Plan | None, words: str) -> None:
    assert error(found) == words


def test_functions_that_one_side_alone_keeps_are_named() -> None:
    was = plan("fp16", 0.002, ("", "pow"), ("head", "exp"))
    now = plan("fp16", 0.002, ("head", "exp"), ("head", "linear"))
    assert (
        exceptions(was, now)
        == "Functions of low-precision modules in FP32 now: linear in head; no longer in FP32: pow in the model's forward."
    )
    assert exceptions(now, None) == "Functions of low-precision modules no longer in FP32: exp in head, linear in head."
    assert (
        exceptions(None, was)
        == "Functions of low-precision modules in FP32 now: pow in the model's forward, exp in head."
    )
    assert exceptions(was, was) == exceptions(None, None) == ""


def test_what_is_said_of_noise() -> None:
    audit = make_audit()
    assert noise(audit) == noise(replace(audit, noise=Noise())) == {}
    assert noise(replace(audit, noise=Noise(runs=4))) == {"Noise": "4 runs in FP32 gave identical outputs"}
    names = tuple(dict.fromkeys(report.node.name for report in audit.nodes))
    found = noise(replace(audit, noise=Noise(2, 0.1, 0.1, 0.3, {}, dict.fromkeys(names, 0.1), names)))
    said = found["Not deterministic"]
    assert said.count("differs by") == NAMED and said.endswith("more, in measurements.json")


def test_the_advice_is_about_the_limit_only_where_a_score_is_beyond_it() -> None:
    found = timed_and_scored()
    single = replace(found, evaluation=replace(found.evaluation, of_mean=None, samples=None))
    assert "gives 0.98611 for the FP32 model (6 calls" in score_headline(single)
    assert score_headline(make_audit(6)) == ""
    assert "--max-drop" in advice(found)
    raised = Score(None, passed=False, failure="it raised")
    failed = {name: replace(plan, score=raised) for name, plan in found.plans.items()}
    assert (
        advice(replace(found, plans=failed))
        == "The function returns no score under these plans; the reasons are listed with the plans."
    )
