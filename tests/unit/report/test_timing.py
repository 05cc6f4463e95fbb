"""FP32 as it is set, and times, in words: numbers with their unit and spread, and what they say nothing of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from auditor.records import Audit, Timed, Times, Timing, Today
from auditor.report.plans import times, today_title
from auditor.report.reporters import html as render
from auditor.report.reporters import markdown, text
from tests.unit.report.factory import make_audit

FAST = Times(0.0012, 0.0011, 0.0013, 20, 2.0, 1.8, 2.2)
WHOLE = Timed(eager=Times(0.0024, 0.0023, 0.0026, 20), memory=4_000_000, missing={"compiled": "no compiler"})


def timed_audit(decides: bool) -> Audit:
    audit = make_audit()
    plans = {
        name: replace(p, timed=Timed(eager=FAST, memory=2_000_000, decides=decides)) for name, p in audit.plans.items()
    }
    timing = Timing("NVIDIA H100" if decides else "cpu", 8, 2, WHOLE, replace(WHOLE, missing={}))
    today = Today(("tf32",), 4.2e-4, True)
    return replace(audit, plans=plans, timing=timing, fp32_today=today)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (FAST, "1.2 ms (1.1 to 1.3), 2.00x"),
        (Times(2.5, 2.25, 3.0, 7), "2.5 s (2.25 to 3)"),
        (Times(5e-4, 4e-4, 1.432e-3, 7), "500 µs (400 to 1432)"),
        (Times(0.00002, 0.00001, 0.00004, 7, 1.1, 0.9, 1.3), "20 µs (10 to 40), 1.10x, no different from FP32"),
    ],
)
def test_times_have_a_unit_and_a_spread(measured: Times, words: str) -> None:
    audit = timed_audit(False)
    assert times(replace(audit, timing=replace(audit.timing, fp32=Timed(eager=measured))))[1] == f"FP32: {words}"


def test_every_reporter_has_the_rows() -> None:
    audit = timed_audit(False)
    for said in (text(audit, width=100, color=False), markdown(audit), render(audit)):
        assert today_title(audit) in said.replace("\\", "") and "4.2e-4" in said
        assert "1.2 ms (1.1 to 1.3), 2.00x" in said.replace("\n          ", " ").replace("\\", "")
    for said in (text(make_audit(), color=False), markdown(make_audit()), render(make_audit())):
        assert "as you have it set" not in said and "One forward" not in said


def test_fp32_that_failed_is_no_number() -> None:
    for today, said in (
        (Today((), None, False, "RuntimeError: no"), "fails to run"),
        (Today((), None, False), "non-finite"),
    ):
        assert f">{said}</td>" in render(replace(make_audit(recommended="autocast_bf16"), fp32_today=today))


def test_on_a_gpu_the_measured_speed_up_is_the_figure() -> None:
    assert ">2.00x measured<" in render(timed_audit(True))
    assert "x measured<" not in render(timed_audit(False))
