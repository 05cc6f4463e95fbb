"""What only the flow as a whole decides: which record goes into which stage."""

import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor import errors
from auditor.errors import (
    AuditorError,
    caused_by,
    device_failed,
    device_is_full,
    from_outside,
    let_through,
    out_of_memory,
)
from auditor.flow import run
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.metrics import output_error
from auditor.records import Audit
from auditor.records.measure import Ignore
from auditor.records.paths import nearest, place_of, within
from auditor.reporters import text
from auditor.settings import Settings
from auditor.stages import Stages, beat, tick
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded, subject_of


def net() -> nn.Module:
    layers = {"first": nn.Linear(8, 16), "norm": nn.LayerNorm(16), "last": nn.Linear(16, 4)}
    return Model(lambda m, x: torch.softmax(m.last(m.norm(m.first(x))), -1), **layers)


def audited(model: nn.Module, held_out: bool = False, **asked: Any) -> Audit:
    subject = subject_of(model, normal(4, 8))
    subject = replace(subject, held_out=(((normal(4, 8, seed=1),), {}),)) if held_out else subject
    return run(subject, Settings(command="test", formats=("bf16",), strategies=("autocast",), device="cpu", **asked))


def test_regions_are_told_in_the_outputs_own_error_whatever_the_metric() -> None:
    model = Function(lambda x: (x / 3.0 - x / 3.0) + x * 0.25)
    (plain,) = audited(model, max_error=1e-4).regions
    (scaled,) = audited(model, max_error=1e-1, metric=lambda r, c: 1000 * output_error(r, c)).regions
    assert plain.explained > 1e-3
    assert (scaled.nodes, scaled.error) == (plain.nodes, plain.error)
    assert scaled.explained == pytest.approx(plain.explained, rel=1e-6)


def test_only_findings_that_are_wanted_are_reported() -> None:
    every = {finding.rule for finding in audited(seeded(net)).findings}
    assert "SFT001" in every
    softmax = audited(seeded(net), select=("SFT",))
    assert {finding.rule for finding in softmax.findings} == {rule for rule in every if rule.startswith("SFT")}
    ignored = audited(seeded(net), ignore=(Ignore("SFT"),))
    assert {finding.rule for finding in ignored.findings} == {rule for rule in every if not rule.startswith("SFT")}


def test_an_unused_ignore_is_a_problem_of_the_settings() -> None:
    said = text(audited(seeded(net), ignore=(Ignore("SFT001", "nowhere"),)))
    assert "Warning in the settings. Delete the entry, or correct its module or code." in said


@pytest.mark.parametrize("held_out", [False, True])
def test_plans_that_were_checked_on_what_they_were_made_from_say_so(held_out: bool) -> None:
    audit = audited(seeded(net), held_out=held_out)
    said = any("verified on the calibration inputs" in warning for warning in audit.warnings)
    verification = audit.plans["autocast_bf16"].verification
    assert (said, verification.inputs) == ((False, "held-out") if held_out else (True, "audited"))


def test_findings_are_about_the_audited_formats_and_training_where_that_is_asked_for() -> None:
    def risky(x: torch.Tensor) -> torch.Tensor:
        length = (x.pow(2).sum(-1, keepdim=True) + 1e-12).sqrt()
        return (x / length).clamp(max=1 - 1e-6).cumsum(-1).log_softmax(-1)

    found = audited(Function(risky)).findings
    assert {"CON003", "SFT001"} <= {item.rule for item in found}
    assert all(item.formats == ("bf16",) and "FP16" not in item.message for item in found)
    assert not [item.rule for item in found if item.rule.startswith("TRN")]


def test_signs_of_life_come_from_inside_of_every_stage_that_runs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal or a watching process hears while one stage takes minutes."""
    heard: Counter[str] = Counter()
    monkeypatch.setattr("auditor.stages.QUIET", 0.0)
    steep = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4))
    with torch.no_grad():
        steep[0].weight.mul_(3000.0)
    batch = (normal(4, 8), normal(4, 4, seed=1))
    asked = {"mode": "training", "loss_fn": nn.functional.mse_loss, "strategies": ("autocast",)}
    asked["progress"] = lambda stage, *rest: heard.update([stage])
    auditor.audit(steep, batch, max_error=1e-4, **asked)  # a budget that plans have to be searched for
    # nothing flagged lies together here
    assert {"measure", "training", "baseline", "plan", "low-precision steps"} <= {s for s in heard if heard[s] > 2}


# What the progress callback hears, and the errors that a user meets.


def test_every_stage_and_step_is_told_and_no_step_goes_beyond_the_total() -> None:
    heard: list[tuple[str, str, int, int]] = []
    stages = Stages(lambda *said: heard.append(said))
    with stages("measure", "two nodes", 2):
        for name in ("a", "b", "b again"):
            tick(name)
    with stages("plan", "solve"):
        tick("first")
    assert heard == [
        ("measure", "two nodes", 0, 2),
        ("measure", "a", 1, 2),
        ("measure", "b", 2, 2),
        ("measure", "b again", 2, 2),
        ("plan", "solve", 0, 0),
        ("plan", "first", 0, 0),
    ]
    assert list(stages.seconds) == ["measure", "plan"]
    assert all(seconds >= 0 for seconds in stages.seconds.values())


def test_what_torch_or_the_model_raises_in_a_stage_is_one_clear_line() -> None:
    said = "in the stage 'measure' an operation raised RuntimeError"
    with refused(AuditorError, "operation-raises", match=said) as raised, Stages(None)("measure", ""):
        torch.ones(2) @ torch.ones(3)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_of_our_own_stays_what_it_is_and_says_in_which_stage() -> None:
    with pytest.raises(AttributeError) as raised, Stages(None)("judge", ""):
        nearest(3, {})
    assert raised.value.__notes__ == ["in the stage 'judge'"]


def test_beats_repeat_what_is_known_and_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("auditor.stages.time.perf_counter", lambda: now[0])
    heard: list[tuple[float, str, int]] = []
    stages = Stages(lambda stage, detail, done, total: heard.append((now[0], detail, done)))
    with stages("measure", "two nodes", 2):
        tick("a")
        for now[0] in (0.2, 0.9, 1.0, 1.5, 2.0):
            beat()
        now[0] = 3.5
        beat("derivatives")
        now[0] = 4.6
        beat()
    assert heard == [
        (0, "two nodes", 0),
        (0, "a", 1),
        (1, "a", 1),
        (2, "a", 1),
        (3.5, "derivatives", 1),
        (4.6, "derivatives", 1),
    ]


def test_a_stage_that_raised_hears_no_more_and_without_one_nobody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auditor.stages.QUIET", 0.0)
    heard: list[str] = []
    beat("before")
    with pytest.raises(TimeoutError), Stages(lambda stage, detail, *_: heard.append(detail))("plan", "begins"):
        raise TimeoutError
    beat("after")
    assert heard == ["begins"]


# Errors the user meets: a slug each, the first line of what others say, and whether that is about what ran.


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("\n first \nsecond"), "first "), (KeyError(), "KeyError"), (RuntimeError("  "), "RuntimeError")],
)
def test_the_first_line_of_an_error(error: Exception, expected: str) -> None:
    assert errors.first_line(error) == expected


def test_errors_go_from_one_process_to_another() -> None:
    for error in (errors.AuditorError("no", "bad-option"), UnsupportedInFormat("no kernel", "layer")):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


HOST_FULL = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried")
FAILED, WRAPPED = (
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("a library's own words"),
)
WRAPPED.__cause__ = FAILED


@pytest.mark.parametrize(
    ("error", "memory", "full", "failed"),
    [
        (MemoryError(), True, False, False),
        (HOST_FULL, True, False, False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, True, False),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True, True, False),
        (FAILED, False, False, True),
        (WRAPPED, False, False, True),
        (RuntimeError("no memory format"), False, False, False),
        (ValueError("out of memory"), False, False, False),
        (KeyError("x"), False, False, False),
    ],
)
def test_what_is_about_memory_or_the_gpu_is_let_through_unless_that_is_the_answer(
    error: Exception, memory: bool, full: bool, failed: bool
) -> None:
    """A GPU that is too small is left for the CPU; tests/pretend_gpu/test_places.py goes there."""
    assert (out_of_memory(error), device_is_full(error), device_failed(error)) == (memory, full, failed)
    with pytest.raises(type(error)) if memory or failed else nullcontext():
        let_through(error)
    let_through(error, memory=False)
    assert not caused_by(error, TimeoutError)


def test_a_model_that_could_not_be_restored_is_no_answer_about_an_operation() -> None:
    with refused(AuditorError, "state-not-restored"):
        let_through(AuditorError("a storage of 12 bytes", slug="state-not-restored"))
    let_through(AuditorError("another reason", slug="unsupported-op"))


def test_a_time_limit_stays_one_when_a_library_wraps_it() -> None:
    wrapped = RuntimeError("failed")
    wrapped.__cause__ = TimeoutError("60 s")
    assert caused_by(wrapped, TimeoutError)
    assert caused_by(TimeoutError(), TimeoutError)


def test_who_raised_it() -> None:
    def caught(call: Callable[[], object]) -> Exception:
        try:
            call()
        except Exception as error:
            return error
        raise AssertionError

    assert from_outside(caught(lambda: torch.ops.aten.mm(torch.ones(2), torch.ones(2))))
    assert not from_outside(caught(lambda: let_through(TimeoutError())))
    assert not from_outside(ValueError())


# Paths of modules: what lies in what.


def test_a_prefix_of_a_name_is_no_scope() -> None:
    assert within("a.b", "a")
    assert within("a", "a")
    assert within("a", "")
    assert not within("ab", "a")


def test_a_place_is_the_line_and_the_operation_or_the_modules_that_repeat_it() -> None:
    written = SimpleNamespace(source="model.py:3", owner="blocks.3.mlp", op="aten.mul.Tensor")
    assert place_of(written) == "model.py:3 mul"
    assert place_of(SimpleNamespace(source=None, owner="blocks.3.mlp", op="getitem")) == "blocks.*.mlp getitem"
