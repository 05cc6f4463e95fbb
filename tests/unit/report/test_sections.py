"""Looks of a terminal, charts, comparisons, noise and scores: each section says what its records hold."""

import math
import re
import sys
from dataclasses import replace

import pytest

from auditor.records import (
    Noise,
    NonFinite,
    Plan,
    ScopeChoice,
    Score,
    TimeAndMemory,
    Times,
    Timing,
    Today,
    Verdict,
    Verification,
)
from auditor.report import words
from auditor.report.blocks import WIDEST, WIDTH, Prose, to_terminal
from auditor.report.charts import BINS, HEIGHT, depth_chart
from auditor.report.diff import error, exceptions
from auditor.report.plans import advice, score_headline, times
from auditor.report.view import NAMED, ReportView, noise
from auditor.reporters import REPORTERS, html
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


def looks() -> tuple[int, bool]:
    """The width of a page on the terminal, and whether it has colors."""
    page = to_terminal([Prose("Label", ("x" * 1000,))])
    plain = re.sub("\x1b\\[[0-9;]*m", "", page)
    return max(map(len, plain.splitlines())), plain != page


@pytest.mark.parametrize(
    ("tty", "variables", "expected"),
    [
        (True, {}, (100, True)),
        (True, {"NO_COLOR": "1"}, (100, False)),
        (True, {"NO_COLOR": "", "FORCE_COLOR": ""}, (100, True)),
        (True, {"TERM": "dumb"}, (100, False)),
        (False, {}, (100, False)),
        (False, {"FORCE_COLOR": "1", "TERM": "dumb"}, (100, True)),
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
    expected = "Functions of low-precision modules in FP32 now: pow in the model's forward, exp in head."
    assert exceptions(None, was) == expected
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
    expected = "The function returns no score under these plans; the reasons are listed with the plans."
    assert advice(replace(found, plans=failed)) == expected


# FP32 as it is set, and times, in words: numbers with their unit and spread, and what they say nothing of.


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (Times(0.0012, 0.0011, 0.0013, 20, 2.0, 1.8, 2.2), "1.2 ms (1.1 to 1.3), 2.00x"),
        (Times(2.5, 2.25, 3.0, 7), "2.5 s (2.25 to 3)"),
        (Times(5e-4, 4e-4, 1.432e-3, 7), "500 µs (400 to 1432)"),
        (
            Times(0.00002, 0.00001, 0.00004, 7, 1.1, 0.9, 1.3),
            "20 µs (10 to 40), 1.10x, not measurably different from FP32",
        ),
    ],
)
def test_times_have_a_unit_and_a_spread(measured: Times, words: str) -> None:
    timing = Timing("cpu", 8, 2, TimeAndMemory(eager=measured), TimeAndMemory(eager=measured))
    assert times(replace(make_audit(), timing=timing))[1] == f"FP32: {words}"


def test_fp32_that_failed_is_no_number() -> None:
    for today, said in ((Today((), None, "RuntimeError: no"), "fails to run"), (Today((), None), "non-finite")):
        assert f">{said}</td>" in html(replace(make_audit(recommended="autocast_bf16"), fp32_today=today))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (0.0, "0"),
        (math.nan, "NaN"),
        (math.inf, "non-finite"),
        (0.00083, "8.3e-4"),
        (0.000994, "9.9e-4"),
        (0.000996, "0.0010"),
        (0.0010, "0.0010"),
        (0.31, "0.31"),
        (12.4, "12"),
        (123.4, "123"),
        (99_999.0, "99999"),
        (1e5, "1.0e5"),
        (9.9e28, "9.9e28"),
    ],
)
def test_ratio(value, text):
    assert words.ratio(value) == text


def test_percent_says_all_only_when_it_is_all():
    assert [words.percent(x) for x in (1.0, 0.9999, 0.5, 0.0001, 0.0)] == ["100%", ">99%", "50%", "<1%", "0%"]


def test_magnitude_and_compact():
    assert [words.magnitude(x) for x in (0.0, 0.5, 65504.0, 3.39e38)] == ["0", "0.5", "65,504", "3.39e38"]
    assert [words.compact(n) for n in (7, 1500, 124_439_808, 3 * 10**12)] == ["7", "1.5k", "124M", "3T"]
    assert [words.in_bytes(n) for n in (7, 512.0, 15 * 10**6, 3_040_000_000)] == ["7B", "512B", "15MB", "3.04GB"]


def test_printable_disarms_control_and_bidirectional_characters():
    assert words.printable("a\x1b[31m\n\u202eb é") == "a\\x1b[31m\\n\\u202eb é"


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["layers.3.mlp"], "layers.3.mlp"),
        (["layers.7.mlp", "layers.3.mlp"], "layers.{3,7}.mlp"),
        ([f"layers.{i}.mlp" for i in range(8)], "layers.{0-7}.mlp"),
        (["b.0", "b.1", "b.2", "b.5", "b.9", "b.10"], "b.{0-2,5,9,10}"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], "a.*.b.* x3"),
        (["a.0.b.0", "a.0.b.2", "a.1.b.0", "a.1.b.2"], "a.{0,1}.b.{0,2}"),
        ([f"b.{i}" for i in range(0, 80, 2)], "b.* x40"),
        (
            ["self_attention_output_projection.0", "self_attention_output_projection.1"],
            "self_attention_output_projection.{0,1}",
        ),
        (["head", "head"], "head x2"),
        ([""], "the model's forward"),
        (["", ""], "the model's forward x2"),
    ],
)
def test_modules_of_one_shape_are_one(paths, said):
    assert words.fold_paths(paths) == said


def test_what_differs_in_block_numbers_alone_is_together():
    found = words.fold(["a.0.x", "b", "a.1.x", "a.0.y"], str)
    assert found == [["a.0.x", "a.1.x"], ["b"], ["a.0.y"]]
    assert words.list_paths(["a.0", "a.1", "b", "c", "d"], 2) == "a.{0,1}, b and 2 more modules"
    assert words.list_paths(["a.0", "a.1", "b", "c"], 2) == "a.{0,1}, b, c"


def test_a_text_of_a_rule_is_paragraphs_and_code():
    text = "Say\nwhat.\n\n    x = 1\n\n    y = 2\n\nAnd `why`:"
    assert words.parts(text) == [("Say what.", False), ("x = 1\n\ny = 2", True), ("And `why`:", False)]
    assert words.summary(text) == "Say what. And `why`."
    assert words.remedy("Do this. Or that.") == "Do this."
    assert [words.sentence(said) for said in ("", "a  thing", "Why?")] == ["", "A thing.", "Why?"]


# Runs that are Inf or NaN in words; sentences are short, and say so too where the operation is not known.


ROOT, BEGINS = ("sqrt", "norm", "aten.sqrt.default", "unet.py:28"), ("sub", "norm", "aten.sub.Tensor", "unet.py:27")
FIRST = NonFinite(*ROOT, "NaN", "underflow", *BEGINS, ("RED004",))
UNKNOWN = Verification(None, False)


def audit(**baselines: Verification):
    made = make_audit()
    plans = {name: replace(plan, verification=None) for name, plan in made.plans.items()}
    return replace(made, baselines={**made.baselines, **baselines}, plans=plans)


def test_a_format_is_only_safe_alone_where_a_run_of_it_is_not_finite():
    safe = Verdict("safe", "")
    made = audit(autocast_fp16=UNKNOWN, cast_fp16=UNKNOWN)
    nodes = tuple(replace(node, verdicts={"fp16": safe, "bf16": safe}, errors={}) for node in made.nodes)
    made = replace(made, nodes=nodes)
    fp16, bf16 = (tally.sentence for tally in ReportView(made).tallies)
    assert fp16.endswith("is unsafe or sensitive when tested alone.")
    assert bf16.endswith("is unsafe or sensitive.")
    page = html(made)
    assert "In FP16 no single operation produces Inf or NaN, but the whole model in low precision does." in page
    assert "In BF16 no value that is finite in FP32 becomes Inf or NaN." in page


def test_a_run_that_turns_non_finite_by_underflow_does_not_make_the_format_overflow():
    vanished = replace(UNKNOWN, nonfinite=FIRST)
    made = audit(autocast_fp16=vanished, cast_fp16=vanished)
    safe, unsafe = Verdict("safe", ""), Verdict("unsafe", "", "range")
    first = replace(
        made.nodes[0], node=replace(made.nodes[0].node, name="sqrt"), verdicts={"fp16": unsafe, "bf16": safe}
    )
    made = replace(made, nodes=(replace(first, errors={}),))
    assert ReportView(made).tallies[0].limit == "underflow (BF16 has FP32's range)"


def test_a_run_of_no_plan_is_passed_over():
    """A plan.json that was edited by hand may hold runs under names that no plan of it has."""
    made, stray = replace(audit(), recommended=None), audit(exotic_fp16=UNKNOWN, magic=Verification(1e-9, True))
    stray = replace(stray, recommended=None)
    for name in ("text", "md", "github", "sarif"):
        assert REPORTERS[name](stray) == REPORTERS[name](made), name
    assert html(stray)
