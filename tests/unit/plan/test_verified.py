"""Plans held against FP32, and against the model without one: hand-made numbers in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import results
from auditor.cli import main
from auditor.criteria.budget import unit_of
from auditor.isolation.process import flags, ieee
from auditor.measure.noise import FP32Runs
from auditor.measure.rerun import OutputMetric
from auditor.numerics.metrics import output_error
from auditor.plan.all_low import run_all_low
from auditor.plan.context import PlanningContext
from auditor.plan.verified import judge_answers, today_of
from auditor.records import Noise, Plan, Program, ScopeChoice, TimeAndMemory, Times, Verification
from auditor.settings import Settings
from auditor.verify import running
from auditor.verify.running import Answers, compare_times
from tests.support.capturing import Function
from tests.support.planning import planning_of
from tests.support.replaying import Model
from tests.support.small_models import Mlp
from tests.support.subjects import normal, seeded

ROOT = {"": ScopeChoice("fp16")}
BASE = Plan("autocast_fp16", "autocast", "fp16", ROOT, 0.001, 0.9, 2.0, Verification(0.002, True))


def bench_with(distance: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]) -> PlanningContext:
    noise = Noise(error=2.0**-30, floor=3 * 2.0**-30)
    return planning(output_metric=OutputMetric(0.01, distance), noise=FP32Runs(noise))


@pytest.mark.parametrize(
    ("errors", "verified"),
    [
        ([0.001, 0.002], True),
        ([0.01], True),
        ([0.001, 0.011], False),
        ([math.inf], False),
        ([math.nan], False),
        ([math.nan, 0.001], False),
        ([0.001, math.nan], False),
    ],
)
def test_the_worst_batch_decides_and_nan_fails(errors: list[float], verified: bool) -> None:
    remaining = iter(errors)
    planning = bench_with(lambda reference, candidate: next(remaining))
    outputs = Answers([[torch.ones(1)] for _ in errors])
    plan = judge_answers(planning, replace(BASE, verification=None), outputs, outputs)
    assert plan.is_verified is verified
    if verified:
        assert plan.measured_error == max(errors)
    assert plan.verification.finite is all(map(math.isfinite, errors))


def judged_with_gradients(without: float, enabled: float) -> Plan:
    """A plan whose outputs are that far from FP32 without and with gradients."""
    expected = Answers([[torch.ones(1)]], [torch.ones(1)])
    answer = Answers([[torch.ones(1) + without]], [torch.ones(1) + enabled])
    return judge_answers(bench_with(output_error), BASE, expected, answer)


def test_the_run_with_gradients_has_an_error_of_its_own_and_must_hold_too() -> None:
    plan = judged_with_gradients(0.004, 0.006)
    assert plan.is_verified and plan.verification is not None
    assert plan.measured_error == pytest.approx(0.004, rel=1e-3)
    assert plan.verification.with_gradients == pytest.approx(0.006, rel=1e-3)
    assert plan.verification.noise == 2.0**-30
    over = judged_with_gradients(0.009, 0.011)
    assert not over.is_verified
    assert over.measured_error == pytest.approx(0.009, rel=1e-3)


def test_a_plan_that_answers_otherwise_with_gradients_has_failed() -> None:
    # FP16 has a unit of 2**-10 = 0.00098: rounding explains up to 2 * 0.001 + 0.00098
    plan = judged_with_gradients(0.001, 0.0031)
    assert (plan.is_verified, plan.measured_error) == (False, None)
    assert "with gradients enabled" in str(plan.verification.failure)
    assert judged_with_gradients(0.001, 0.0029).is_verified
    assert judged_with_gradients(math.nan, 0.5).measured_error is None


def test_a_program_that_raises_with_gradients_alone_is_for_inference_and_another_plan_has_failed() -> None:
    planning, output = bench_with(output_error), [[torch.ones(1)]]
    answer = Answers(output, ungraded="RuntimeError: no")
    failed = judge_answers(planning, BASE, Answers(output, output[0]), answer)
    assert not failed.is_verified
    assert failed.verification.failure == "with gradients enabled, RuntimeError: no"
    program = judge_answers(
        planning, replace(BASE, program=Program("p.pt2", 1, 1, 0)), Answers(output, output[0]), answer
    )
    assert program.is_verified
    assert program.verification.ungraded == "RuntimeError: no"
    shown = results.Plan(**vars(program))
    assert "for inference only: with gradients enabled the program raises RuntimeError: no" in " ".join(
        repr(shown).split()
    )


@pytest.mark.parametrize("answer", ["out of memory, no", Answers([[torch.ones(1)]], ungraded="out of memory, no")])
def test_a_gpu_without_memory_refutes_no_plan(answer: Answers | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "native", True)
    with pytest.raises(torch.OutOfMemoryError, match="no"):
        judge_answers(bench_with(output_error), BASE, Answers([[torch.ones(1)]]), answer)


def test_outputs_of_another_shape_are_a_failure_of_the_plan() -> None:
    plan = judge_answers(bench_with(output_error), BASE, Answers([[torch.ones(5)]]), Answers([[torch.ones(3)]]))
    assert not plan.is_verified
    assert "shape" in str(plan.verification.failure)


# Times of FP32 and of every plan: measured on the emitted file where there is one, held against FP32.


def test_a_speed_up_has_the_spread_of_both() -> None:
    whole = TimeAndMemory(eager=Times(0.4, 0.3, 0.5, 9), compiled=Times(0.1, 0.1, 0.1, 9), memory=200)
    found = compare_times(TimeAndMemory(eager=Times(0.2, 0.1, 0.25, 9), memory=50), whole)
    assert found.eager is not None and found.compiled is None
    assert found.eager.speedup == pytest.approx(2.0)
    assert found.eager.speedup_low == pytest.approx(0.3 / 0.25)
    assert found.eager.speedup_high == pytest.approx(0.5 / 0.1)
    assert found.memory_share == 0.25
    raised = TimeAndMemory(missing={"eager": "it raised"})
    assert compare_times(raised, whole) == raised


def test_a_model_in_hand_is_timed_as_it_is_and_its_recommendation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SECONDS", 0.001)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    given: Any = (model.eval(), (torch.ones(6, 32),))
    asked = {"device": "cpu", "formats": ("bf16", "fp8_e4m3"), "strategies": "autocast"}
    untimed = auditor.audit(*given, **asked)
    assert untimed.timing is None and all(plan.timed is None for plan in untimed.plans.values())
    audit = auditor.audit(*given, **asked, measure_time=True)
    assert (audit.timing.device, audit.timing.batch, audit.timing.fp32_today) == ("cpu", 6, None)
    assert audit.timing.threads == torch.get_num_threads()
    ran = audit.plans["autocast_bf16"].timed
    assert ran is not None and ran.eager is not None and ran.memory is not None and not ran.decides
    whole = audit.timing.fp32
    assert ran.eager.speedup == pytest.approx(whole.eager.median / ran.eager.median)
    assert ran.memory_share == pytest.approx(ran.memory / whole.memory)
    assert audit.plans["autocast_fp8_e4m3"].timed is None  # nothing runs in it
    assert (audit.recommended, audit.recommendation) == (untimed.recommended, untimed.recommendation)


MODEL = """
import torch
from torch import nn

torch.set_float32_matmul_precision("medium")

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

def get_inputs():
    return torch.ones(6, 32)
"""


@pytest.mark.slow
def test_the_emitted_file_is_timed_in_a_process_of_its_own_under_flags_that_its_source_sets(tmp_path: Path) -> None:
    file, out = tmp_path / "net.py", tmp_path / "out"
    file.write_text(MODEL, encoding="utf-8")
    words = ["--measure-time", "--device", "cpu", "--formats", "bf16", "-q", "--out", str(out)]
    assert main([str(file), *words]) in (0, 1)
    audit = auditor.load(out)
    assert torch.get_float32_matmul_precision() == "highest"
    assert audit.environment.flags["float32_matmul_precision"] == "medium"
    assert audit.timing.fp32_today.eager is not None and audit.timing.fp32_today.eager.speedup is not None
    for plan in audit.plans.values():
        assert plan.timed is not None and plan.timed.eager is not None
        assert (plan.timed.compiled is None) == ("compiled" in plan.timed.missing)
    assert audit.timing.fp32.memory == 4 * (32 * 32 + 32 + 32 * 4 + 4) + 4 * 6 * 32 + 2 * 4 * 6 * 32


# What plans are made from: reference answers that are run once, and problems by strategy and format.


def planning(**changes: Any) -> PlanningContext:
    return replace(planning_of(Function(lambda x: x + 1), torch.zeros(2)), **changes)


def test_references_are_run_once_per_batch() -> None:
    found = planning()
    batch = found.subject.batches[0]
    first = found.reference(batch)
    assert first[0].tolist() == [1.0, 1.0]
    assert found.reference(batch) is first


def test_a_plan_may_err_by_the_budget_or_by_what_is_no_error_here() -> None:
    assert planning().max_error == 0.01
    assert planning(noise=FP32Runs(Noise(error=0.001, floor=0.003))).max_error == 0.01
    assert planning(noise=FP32Runs(Noise(error=0.01, floor=0.03))).max_error == 0.03


def largest(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    return max(float((r - c.float()).abs().max()) for r, c in zip(reference, low, strict=True))


def in_percent(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    return 100 * output_error(reference, low)


def flips(reference: Sequence[Tensor], low: Sequence[Tensor]) -> float:
    return float(sum((r.sign() != c.sign()).sum() for r, c in zip(reference, low, strict=True)))


def test_the_unit_by_hand() -> None:
    # BF16 has steps of 1 between 128 and 256: 200.4 becomes 200, an error of 0.4 and a relative one of 0.4 / 200.4
    assert unit_of(largest, [torch.tensor([200.4])], 1.0) == pytest.approx(200.4, rel=1e-4)
    assert unit_of(in_percent, [normal(8)], 1.0) == pytest.approx(100)


@pytest.mark.parametrize("outputs", [[torch.tensor([1.0, 2.0])], [normal(8)]])
def test_a_metric_that_rounding_does_not_move_has_no_unit(outputs: list[Tensor]) -> None:
    assert unit_of(flips, outputs, 1.0) == 1.0


def test_a_budget_beyond_what_the_solver_can_tell_from_a_prohibition_leaves_errors_relative() -> None:
    assert unit_of(in_percent, [normal(8)], 1000.0) == 1.0


def test_the_scale_of_a_metric_does_not_matter() -> None:
    def answers(**options: object) -> auditor.Audit:
        model: nn.Module = seeded(Mlp)
        return auditor.audit(model, normal(4, 6), formats=("bf16",), strategies=("cast",), device="cpu", **options)

    plain, scaled = answers(max_error=0.004), answers(max_error=0.4, metric=in_percent)
    verdicts = [[(r.node.name, r.verdicts["bf16"].verdict) for r in audit.nodes] for audit in (plain, scaled)]
    assert verdicts[0] == verdicts[1]
    ours, theirs = plain.plans["cast_bf16"], scaled.plans["cast_bf16"]
    expected = {path: choice.precision for path, choice in theirs.scopes.items()}
    assert {path: choice.precision for path, choice in ours.scopes.items()} == expected
    assert theirs.predicted_error == pytest.approx(100 * ours.predicted_error)
    assert theirs.measured_error == pytest.approx(100 * ours.measured_error)


# Baselines are runs of the model as its user runs it, on the inputs that plans are checked on.


Seen = tuple[int, torch.dtype, torch.dtype]


def logbook() -> tuple[list[Seen], Callable[[Seen], None]]:
    seen: list[Seen] = []
    return seen, lambda entry: seen.append(entry)


SEEN, note = logbook()
"""What a model of noting() was asked. No attribute of it and no global that it names, since every run leaves those as they were."""


def noting() -> nn.Module:
    """Notes the dtype in which it is asked, how often, and the shape."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        note((len(x), x.dtype, y.dtype))
        return y

    return Model(forward, lin=nn.Linear(4, 4))


def bench_beside(model: nn.Module, *held_out: Tensor, formats: Sequence[str] = ("bf16",)) -> PlanningContext:
    planning = planning_of(model, normal(3, 4), formats=formats)
    subject = replace(planning.subject, held_out=tuple(((x,), {}) for x in held_out))
    return replace(planning, subject=subject, output_metric=OutputMetric(0.01))


def test_the_model_itself_is_run_low_on_every_check_whatever_its_shape() -> None:
    model = seeded(noting)
    planning = bench_beside(model, normal(2, 4), normal(5, 4))
    SEEN.clear()
    found = run_all_low(planning).runs
    low = [seen for seen in SEEN if seen[2] is not torch.float32]
    assert low == [
        (2, torch.float32, torch.bfloat16),
        (5, torch.float32, torch.bfloat16),
        (2, torch.bfloat16, torch.bfloat16),
        (5, torch.bfloat16, torch.bfloat16),
    ]
    for baseline in found.values():
        assert 0 < baseline.measured_error < 0.01
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_raises_is_the_baselines_failure() -> None:
    factoring = Function(lambda x: torch.linalg.cholesky(x.t() @ x + torch.eye(4, dtype=x.dtype)).float())
    found = run_all_low(bench_beside(factoring, formats=("fp16",))).runs
    cast = found["cast_fp16"]
    assert (cast.measured_error, cast.finite) == (None, False)
    assert "cholesky" in str(cast.failure)


ALLOWED = {"mkldnn.matmul.fp32_precision": "tf32"}


def test_fp32_as_the_caller_has_it_set_is_a_row_where_it_differs() -> None:
    """A GPU loses bits where the flags of TF32 allow it: so does this model."""
    before = flags()
    rounds = Function(lambda x: x * (1 + 2.0**-11 * (torch.backends.mkldnn.matmul.fp32_precision == "tf32")))
    with ieee():
        found = today_of(replace(bench_beside(rounds), flags=ALLOWED))
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert flags() == before
    assert found is not None and (found.computed_in, found.failure) == (("tf32",), None)
    assert found.measured_error == pytest.approx(2.0**-11, rel=1e-3)


def test_fp32_as_it_is_set_is_no_row_where_it_is_the_same() -> None:
    planning = replace(bench_beside(seeded(noting)), flags={**flags(), "mkldnn.matmul.fp32_precision": "ieee"})
    SEEN.clear()
    assert today_of(planning) is None and not SEEN  # nothing else is allowed, so nothing is run
    assert today_of(replace(planning, flags=ALLOWED)) is None and SEEN


def test_fp32_that_fails_as_it_is_set_says_so() -> None:
    def fails(x: Tensor) -> Tensor:
        if torch.backends.mkldnn.matmul.fp32_precision == "tf32":
            raise RuntimeError("no such arithmetic")
        return x + 1

    with ieee():
        found = today_of(replace(bench_beside(Function(fails)), flags=ALLOWED))
    said = "RuntimeError: no such arithmetic"
    assert found is not None and found.measured_error is None and str(found.failure).startswith(said)
